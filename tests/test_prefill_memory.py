"""The memory that a prompt takes does not grow with its length."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

# A process of its own: the largest memory a process ever had is all that the system can tell.
PROGRAM = """
import resource, sys
import torch
from model_testing import make, variant

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

torch.set_num_threads(1)
lm = make(variant(n_layer=1, d_inner=512, d_ssm=512, headdim=64, d_state=32), "bfloat16")
ids = torch.randint(60, (1, 16384))
for _ in range(2):
    lm.prefill(ids[:, :1024])
before = peak()
lm.prefill(ids)
print(peak() - before)
"""


def test_prefill_memory_is_flat():
    paths = [str(ROOT / folder) for folder in (".", "kernels", "tests")]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}\n{PROGRAM}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    growth = int(result.stdout) * (1 if sys.platform == "darwin" else 1024)
    # What in_proj gives for all the tokens at once, in bf16, would be 36 MB.
    assert growth < 8e6
