"""Decoding a whole model by the format of its recurrent state, on one GPU.

    PYTHONPATH=.:kernels:commands python benchmarks/state_decode.py --shape 2.7b --batches 64 256 --out DIR

Random weights in a published shape, bf16. A step is one of the loop that `generate` runs, greedy, read back
on the host. `bf16` and `fp32` alone are plain tensors that each step rewrites, as mamba_ssm's are; all
others are written once in a window of tokens. Writes DIR/state_decode.json.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))

from gpu_table import decode, model

FORMATS = ("fp32", "bf16", "fp32:8", "bf16:8", "fp16", "fp8", "int8", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="2.7b")
    parser.add_argument("--batches", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    results = []
    for batch in options.batches:
        for state_dtype in options.formats:
            ms = decode(options.shape, batch, state_dtype)
            nbytes = model(options.shape).with_state(state_dtype).init_state(1).nbytes
            results.append({"batch": batch, "state": state_dtype, "ms": ms, "state bytes": nbytes})
            print(
                f"{options.shape} batch {batch:4} {state_dtype:8} {ms:8.3f} ms/step",
                f"{nbytes / 2**20:8.1f} MiB a sequence",
                flush=True,
            )
    options.out.mkdir(parents=True, exist_ok=True)
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    about = {"machine": machine, "shape": options.shape, "results": results}
    (options.out / "state_decode.json").write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
