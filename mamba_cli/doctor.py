"""What `mamba2 doctor` looks at: software, devices, backends, the hub's cache, and tests of what is here.

Nothing here reaches for a network, and packages are imported inside functions only: one that cannot be
imported is a finding.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from mamba_cli.errors import Mamba2Error
from mamba_cli.machine import REQUIRED, device_name, versions

if TYPE_CHECKING:
    import torch

    from mamba_cli.self_test import Outcome

# What the embedded model continues: the likeliest token leads clearly at each step, so that devices,
# which round differently, agree on it.
PROMPT = "Once upon a time"
NEW_TOKENS = 8

# Without these there is nothing left to test.
FOUNDATIONS = ("torch", "safetensors")


@dataclass(frozen=True)
class Device:
    """A device that models can run on.

    backend: what operations use on it by default. reason: why not something faster; "" where there is
    nothing faster, or it stands above in the list.
    """

    device: str
    name: str
    details: str
    backend: str
    reason: str


@dataclass(frozen=True)
class Hub:
    """Where models of the hub are kept, and whether others could be fetched.

    models: repositories in the cache. token: whether one is set up; it is not shown.
    """

    cache: str
    models: int
    offline: bool
    endpoint: str
    token: bool


@dataclass(frozen=True)
class Diagnosis:
    """All findings; `broken` names, one line each, what has to be repaired."""

    versions: dict[str, str | None]
    devices: Sequence[Device] = ()
    hub: Hub | None = None
    tests: Sequence["Outcome"] = ()
    broken: list[str] = field(default_factory=list)


def diagnose(advance: Callable[..., None] = lambda amount, label=None: None) -> Diagnosis:
    """Look at everything; advance(1, label) is called after each test."""
    found = versions()
    broken = [f"{package}: expected it installed, got none" for package in REQUIRED if not found[package]]
    unusable = _find_unusable()
    broken += [f"{package}: {problem}" for package, problem in unusable.items() if found[package]]
    if not unusable.keys().isdisjoint(FOUNDATIONS):
        return Diagnosis(found, broken=broken)

    import torch

    from mamba_kernels.backend import interpreting, triton_problem

    found["cuda"] = torch.version.cuda
    devices = find_devices()
    broken += [
        f"triton: expected it to serve {device.device}, got: {device.reason}"
        for device in devices
        if device.device != "cpu" and device.backend != "triton"
    ]
    if interpreting() and found["triton"] and (problem := triton_problem()):
        broken.append(f"triton: expected it to serve its interpreter, got: {problem}")
    hub = None
    if "huggingface-hub" not in unusable:
        try:
            hub = find_hub()
        except Exception as error:  # a cache or a token that is no such thing fails in many ways
            broken.append(f"hub: expected to read its cache and token, got {type(error).__name__}: {error}")
    tests = []
    for test in run_tests(devices):
        tests.append(test)
        advance(1, test.test)
    broken += [
        f"{test.test} on {test.device} ({test.backend}): {test.detail}"
        for test in tests
        if test.result == "broken"
    ]
    return Diagnosis(found, devices, hub, tests, broken)


def _find_unusable() -> dict[str, str]:
    """Return the required packages that cannot be imported, each with the reason."""
    unusable = {}
    for package in REQUIRED:
        try:
            importlib.import_module(package.replace("-", "_"))
        except Exception as error:  # a broken install raises anything at all
            first_line = next(iter(str(error).splitlines()), "")
            unusable[package] = f"cannot import it ({type(error).__name__}: {first_line})"
        if "torch" in unusable:
            break  # others import it too, and would only repeat what is wrong with it
    return unusable


def find_devices() -> list[Device]:
    """Return the CPU, and every GPU that torch finds; the one that "auto" takes first."""
    import torch

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [_describe(device) for device in (*devices, torch.device("cpu"))]


def _describe(device: "torch.device") -> Device:
    import torch

    from mamba_cli.self_test import why_not_triton
    from mamba_kernels.backend import backend_for

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason is given here
        backend = backend_for(device)
    reason = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        details = f"{properties.total_memory / 2**30:.0f} GiB, compute capability {capability}"
        reason = "" if backend == "triton" else why_not_triton(device) or ""
    else:
        details = f"threads: {torch.get_num_threads()}, {_bfloat16_layout()}"
        reason = "" if torch.cuda.is_available() else f"no GPU: {why_not_cuda()}"
    return Device(str(device), device_name(device), details, backend, reason)


def _bfloat16_layout() -> str:
    import torch

    from mamba_cli.linear import Linear

    if Linear(torch.zeros(1, 1, dtype=torch.bfloat16)).packed:
        return "bfloat16 in oneDNN's packed layout"
    return "bfloat16 in the plain layout, as oneDNN has no fast one for this processor"


def why_not_cuda() -> str:
    """Return why torch finds no GPU, in its own words where it has any."""
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
    return "torch finds no CUDA device"


def find_hub() -> Hub:
    """Return the state of the hub's cache; nothing is fetched."""
    from pathlib import Path

    from huggingface_hub import constants, get_token

    cache = Path(constants.HF_HUB_CACHE)
    return Hub(
        cache=str(cache),
        models=len(list(cache.glob("models--*"))),
        offline=bool(constants.HF_HUB_OFFLINE),
        endpoint=constants.ENDPOINT,
        token=get_token() is not None,
    )


def run_tests(devices: Sequence[Device]) -> Iterator["Outcome"]:
    """Test every operation on the first device, and the embedded model on all of them."""
    import torch

    from mamba_cli.self_test import attempt, try_operations

    first, cpu = devices[0], devices[-1]
    yield from try_operations(torch.device(first.device), first.backend)
    for device in (cpu, *devices[:-1]):
        check = partial(_check_embedded_model, device.device)
        yield attempt("embedded model", device.device, device.backend, True, check)


def _check_embedded_model(device: str) -> str:
    """Continue a text: the tokenizer, the checkpoint and the whole runtime take part."""
    text = _continue_text(device)
    if device != "cpu" and text != (expected := _continue_text("cpu")):
        raise Mamba2Error(f"text: expected {expected!r} as on the CPU, got {text!r}")
    return f"wrote {text!r}"


def _continue_text(device: str) -> str:
    from mamba_cli import load_model
    from mamba_cli.generation import Generation, generate
    from mamba_cli.sampling import SamplingParams

    lm = load_model("demo", device, "float32")
    greedy = SamplingParams(temperature=0)
    *_, last = generate(lm, lm.tokenizer.encode(PROMPT), greedy, max_new_tokens=NEW_TOKENS)
    assert isinstance(last, Generation)
    return last.samples[0].text
