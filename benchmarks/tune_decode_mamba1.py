"""Choose the block sizes of the Mamba-1 decode step's own kernels, and time whole models.

    PYTHONPATH=.:kernels:commands python benchmarks/tune_decode_mamba1.py --out DIR

Every candidate is compiled and compared with torch first, then timed in a CUDA graph over as many layers as
make their weights and states come from memory; then the loop that `generate` runs, and the fused step beside
the general one, both as bare graphs. Takes about a minute.
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tuning import DEVICE, Config, about, milliseconds, problems, relative_error, short

from mamba_cli.fused_step_mamba1 import FusedStepMamba1
from mamba_cli.load import random_model
from mamba_cli.shapes import published_config
from mamba_kernels.backend import use_backend
from mamba_kernels.decode_layer import MANY_ROWS
from mamba_kernels.decode_mamba1 import mamba1_ssm_step, x_proj_step

COPY_RATE = 4.27e12  # bytes a second, of a large copy on an H200
LARGER_THAN_CACHE = 200e6  # bytes

# Outputs of a program, warps and blocks of the weight under way ahead of the kernel before.
X_PROJ = ((1, 1, 6), (1, 2, 4), (1, 4, 2), (1, 4, 8), (2, 2, 4), (4, 1, 6))
# Rows of the batch, channels and warps of a program.
SSM_FEW = ((1, 4, 1), (1, 8, 1), (1, 16, 1), (1, 16, 2), (1, 32, 4))
SSM_MANY = ((1, 32, 1), (1, 64, 2), (2, 32, 1), (2, 64, 2), (4, 16, 1), (4, 32, 1), (4, 64, 2), (8, 16, 1))


class Case(NamedTuple):
    """What lies between the convolution and out_proj, of a published shape at one batch size."""

    shape: str
    batch: int
    state: torch.dtype = torch.float32

    def candidates(self, smoke: bool) -> list[tuple[str, Config | None]]:
        """(kernel, its configuration), of the other kernel the default; None for the default of both."""
        few = self.batch < MANY_ROWS
        width = 32 if smoke else published_config(self.shape).d_inner
        x_proj = [
            {
                "BLOCK_M": 1,
                "BLOCK_N": rows,
                "BLOCK_K": 256 * warps,
                "PREFETCH": min(prefetch, -(-width // (256 * warps))),
                "num_warps": warps,
            }
            for rows, warps, prefetch in X_PROJ
        ]
        ssm = [
            {"BLOCK_M": batch_rows, "BLOCK_P": rows, "num_warps": warps}
            for batch_rows, rows, warps in (SSM_FEW if few else SSM_MANY)
        ]
        found = [("x_proj", config) for config in x_proj if few] + [("ssm", config) for config in ssm]
        return [("default", None)] + (found[::3] if smoke else found)


CASES = [
    Case("mamba1-130m", 1),
    Case("mamba1-2.8b", 1),
    Case("mamba1-130m", 64),
    Case("mamba1-2.8b", 64),
    Case("mamba1-2.8b", 64, torch.bfloat16),
]


class Layer:
    """Random weights, state and buffers of one layer."""

    def __init__(self, case: Case, smoke: bool):
        config = published_config(case.shape)
        d_inner, d_state, dt_rank = (32, 16, 6) if smoke else (config.d_inner, 16, config.dt_rank)
        many, dtype = case.batch >= MANY_ROWS, torch.bfloat16 if DEVICE == "cuda" else torch.float32
        batch = MANY_ROWS if smoke and many else case.batch

        def random(*size: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*size, dtype=kind, device=DEVICE).normal_()

        fp32 = torch.float32
        columns = dt_rank + 2 * d_state
        self.xz = random(batch, 2 * d_inner)
        self.x_weight = random(columns, d_inner) * d_inner**-0.5
        self.dtBC = random(batch, columns, kind=dtype if many else fp32)
        self.ssm_state = random(
            batch, d_inner, d_state, kind=case.state if DEVICE == "cuda" else torch.float32
        )
        self.parameters = dict(
            dt_weight=random(d_inner, dt_rank) * dt_rank**-0.5,
            dt_bias=random(d_inner, kind=fp32) - 4,
            A=-random(d_inner, d_state, kind=fp32).exp(),
            D=random(d_inner, kind=fp32),
        )
        self.out = random(batch, d_inner)
        self.dt = random(batch, d_inner) if many else None

    @property
    def nbytes(self) -> int:
        """What a step moves at least: weights once, the state twice."""
        weights = [self.x_weight, *self.parameters.values()]
        return sum(tensor.nbytes for tensor in weights) + 2 * self.ssm_state.nbytes

    def run(self, kernel: str = "default", config: Config | None = None) -> None:
        d_inner = self.out.shape[1]
        x_proj_step(
            self.xz[:, :d_inner], self.x_weight, self.dtBC,
            pdl=True, config=config if kernel == "x_proj" else None,
        )  # fmt: skip
        mamba1_ssm_step(
            self.xz, self.dtBC, self.ssm_state, **self.parameters, out=self.out, dt=self.dt,
            pdl=True, config=config if kernel == "ssm" else None,
        )  # fmt: skip


Job = tuple[Case, str, Config | None, bool]


def compare(job: Job) -> str | None:
    """Run a candidate beside torch; return what is wrong with it, if anything."""
    case, kernel, config, smoke = job
    results = []
    for backend in ("torch", "triton"):
        torch.manual_seed(0)
        layer = Layer(case, smoke)
        with use_backend(backend):
            layer.run(kernel, config)
        results.append((layer.dtBC, layer.out, layer.ssm_state))
    errors = [relative_error(ours, expected) for expected, ours in zip(*results, strict=True)]
    return None if max(errors) < 0.02 else f"relative errors {errors} against torch"


def tune(case: Case, smoke: bool, found: list[tuple[Job, str | None]]) -> list[dict[str, Any]]:
    """Time the candidates that are right; print them, the fastest first."""
    layer = Layer(case, smoke)
    count = 1 if smoke else int(LARGER_THAN_CACHE // layer.nbytes) + 1
    layers = [layer] + [Layer(case, smoke) for _ in range(count - 1)]
    bound = layer.nbytes / COPY_RATE * 1e6

    def token(kernel: str, config: Config | None) -> None:
        with use_backend("triton"):
            for layer in layers:
                layer.run(kernel, config)

    trials = []
    for (its_case, kernel, config, _), problem in found:
        if its_case != case:
            continue
        trial = {"case": str(case), "kernel": kernel, "config": config, "problem": problem}
        if problem is None:
            trial["us"] = 1e3 * milliseconds(partial(token, kernel, config)) / count
        trials.append(trial)
    print(
        f"{case.shape}, batch {case.batch}, {case.state} state: x_proj to gate, bound {bound:.2f} us a layer"
    )
    for trial in sorted(trials, key=lambda trial: trial.get("us", float("inf"))):
        told = f"{trial['us']:7.2f} us" if "us" in trial else f"broken: {trial['problem']}"
        print(f"  {told}  {trial['kernel']} {short(trial['config'])}", flush=True)
    return trials


@torch.inference_mode()
def time_model(shape: str, batch: int) -> dict[str, Any]:
    """The loop that `generate` runs, and the fused and the general step as bare graphs, in ms a token."""
    import gpu_table  # needs CUDA

    config = published_config(shape)
    loop = gpu_table.decode(shape, batch)
    lm = gpu_table.model(shape)
    state = lm.init_state(batch)
    tokens = torch.arange(batch, device=DEVICE)
    fused = FusedStepMamba1(lm.model, batch)
    with use_backend("triton"):
        fused_ms = milliseconds(lambda: fused(tokens, state))
        general_ms = milliseconds(lambda: lm.model.head(lm.model.step(tokens, state)))
    matrices = sum(parameter.nbytes for parameter in weights_read(lm.model))
    bound = (matrices + 2 * state.nbytes) / COPY_RATE * 1e3
    print(
        f"{shape} ({config.n_layer} layers), batch {batch}: loop {loop:.3f} ms, fused step {fused_ms:.3f}, "
        f"general step {general_ms:.3f}, bound {bound:.3f}",
        flush=True,
    )
    return dict(shape=shape, batch=batch, loop=loop, fused=fused_ms, general=general_ms, bound=bound)


def weights_read(model: Any) -> list[torch.Tensor]:
    """The tensors that a token reads whole."""
    mixers = [block.mixer for block in model.blocks]
    linears = [linear for m in mixers for linear in (m.in_proj, m.x_proj, m.dt_proj, m.out_proj)]
    return [linear.weight for linear in (*linears, model.head)] + [mixer.A for mixer in mixers]


@torch.inference_mode()
def check_model() -> None:
    """The fused step against the general one, at the sizes of a real layer."""
    config = replace(published_config("mamba1-130m"), n_layer=3, bcdt_norm_eps=1e-6)
    lm = random_model(config, DEVICE, "bfloat16", on_device=True)
    for batch in (1, 3, 64):
        tokens = torch.arange(batch, device=DEVICE)
        states, fused = [lm.init_state(batch), lm.init_state(batch)], FusedStepMamba1(lm.model, batch)
        with use_backend("triton"):
            for _ in range(3):
                ours = fused(tokens, states[0])
                expected = lm.model.head(lm.model.step(tokens, states[1]))
        error = relative_error(ours, expected)
        print(f"fused step against the general one, batch {batch}: relative error {error:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for tune_decode_mamba1.json")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to try the script itself")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    models = []
    if DEVICE == "cuda":
        check_model()
        for shape in ("mamba1-130m", "mamba1-2.8b"):
            models += [time_model(shape, batch) for batch in (1, 64)]
    jobs = [
        (case, *candidate, options.smoke) for case in CASES for candidate in case.candidates(options.smoke)
    ]
    found = list(zip(jobs, problems(compare, jobs), strict=True))
    trials = [trial for case in CASES for trial in tune(case, options.smoke, found)]
    report = about() | {"models": models, "trials": trials}
    (options.out / "tune_decode_mamba1.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
