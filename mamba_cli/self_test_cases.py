"""What the self-test tries: each operation at a tiny shape, and what it has to give, in float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mamba_cli.config import ModelConfig
from mamba_cli.load import random_model
from mamba_cli.shapes import published_config
from mamba_cli.step_graph import step_function
from mamba_kernels.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_ref,
    causal_conv1d_update,
    causal_conv1d_update_ref,
)
from mamba_kernels.choose_token import choose_token, choose_token_ref
from mamba_kernels.chunk_scan import mamba_chunk_scan_combined, ssd_recurrent_ref
from mamba_kernels.decode_layer import in_proj_step, lm_head_step
from mamba_kernels.decode_norm import NormBuffers, Normed
from mamba_kernels.packed_selective_update import packed_selective_update
from mamba_kernels.packed_ssm_step import Preparation, packed_ssm_step
from mamba_kernels.packed_state import (
    STATE_DTYPES,
    LayerFormat,
    advance_positions,
    empty_packed_state,
)
from mamba_kernels.rmsnorm import add_norm_fn, add_norm_ref, rmsnorm_fn, rmsnorm_ref
from mamba_kernels.selective_scan import selective_scan_fn, selective_scan_ref
from mamba_kernels.selective_state_update import selective_state_update, selective_state_update_ref

Results = list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One operation: run(device, dtype) is tested, and reference() is what it has to give, in float64."""

    operation: str
    run: Callable[[torch.device, torch.dtype], Results]
    reference: Callable[[], Results]
    dtype: torch.dtype = torch.float32


def _cases(
    name: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    shapes: dict[str, tuple[int, ...]],
    updates: str | None = None,
    differentiable: bool = False,
    **options: Any,
) -> list[Case]:
    """The cases of a function on tensors of `shapes`; updates: the argument that it changes in place."""

    def inputs(device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        tensors = {
            argument: torch.randn(shape, generator=generator, dtype=torch.float64)
            for argument, shape in shapes.items()
        }
        if "A" in tensors:
            tensors["A"] = -tensors["A"].exp()
        return {argument: tensor.to(device, dtype) for argument, tensor in tensors.items()}

    def forward(called: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Results:
        tensors = inputs(device, dtype)
        with torch.no_grad():
            results = _as_list(called(**tensors, **options))
        return results + ([tensors[updates]] if updates else [])

    def backward(called: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Results:
        tensors = {argument: tensor.requires_grad_() for argument, tensor in inputs(device, dtype).items()}
        with torch.enable_grad():
            results = _as_list(called(**tensors, **options))
            weights = [
                torch.linspace(-1, 1, result.numel(), device=device, dtype=result.dtype).view_as(result)
                for result in results
            ]
            return list(torch.autograd.grad(results, list(tensors.values()), weights))

    passes = {name: forward, f"{name} backward": backward} if differentiable else {name: forward}
    oracle = (torch.device("cpu"), torch.float64)
    return [
        Case(operation, partial(run, function), partial(run, reference, *oracle))
        for operation, run in passes.items()
    ]


def _as_list(results: torch.Tensor | tuple[torch.Tensor, ...]) -> Results:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def _scan_recurrently(chunk_size: int, **arguments: Any) -> tuple[torch.Tensor, ...]:
    return ssd_recurrent_ref(**arguments)


# Plain enough for the fused step, with groups, several heads and a padded vocabulary.
TINY = replace(
    published_config("130m"),
    d_model=32,
    n_layer=1,
    vocab_size=61,
    vocab_rows=64,
    d_state=16,
    d_inner=64,
    d_ssm=64,
    headdim=16,
    ngroups=2,
)
# With FalconMamba's norms.
TINY_MAMBA1 = replace(
    TINY, layer="Mamba1", rmsnorm=False, headdim=1, ngroups=1, dt_rank=6, bcdt_norm_eps=1e-6
)


def _decode_case(
    operation: str, batch: int, dtype: torch.dtype = torch.float32, config: ModelConfig = TINY
) -> Case:
    """Two tokens through the kernels that decoding on a GPU fuses; the reference is the general step."""

    def decode(fused: bool, device: torch.device, dtype: torch.dtype) -> Results:
        lm = random_model(config, str(device), str(dtype).removeprefix("torch."), backend="torch")
        model, state = lm.model, lm.init_state(batch)
        step = step_function(model, state) if fused else lambda ids, state: model.head(model.step(ids, state))
        token_ids = torch.arange(batch, device=device)
        with torch.no_grad():
            logits = [step(token_ids + shift, state).clone() for shift in (0, 1)]
        return logits + [tensor for layer in state.layers for tensor in layer.tensors()]

    general = partial(decode, False, torch.device("cpu"), torch.float64)
    return Case(operation, partial(decode, True), general, dtype)


def _project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Normalised rows times a weight, as the decode step multiplies them: the rows in two factors."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    squares = x.float().square().sum(-1)[:, None, None]
    lm_head_step(Normed(x, squares, 1e-5), weight, out)
    return out


def _project_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) @ weight.T


def _choice_case(operation: str, **options: float) -> Case:
    """One choice for each of three rows, with a random number far from the edges of the tokens' shares."""

    def inputs(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(3, 64, generator=generator, dtype=torch.float64) * 3
        uniform = torch.full((1, 3), 0.37, dtype=torch.float64)
        return logits.to(device, dtype), uniform.to(device)

    def choose(device: torch.device, dtype: torch.dtype) -> Results:
        logits, uniform = inputs(device, dtype)
        token_ids, turn = (torch.zeros(3, dtype=torch.int64, device=device) for _ in range(2))
        choose_token(logits, token_ids, vocab_size=61, turn=turn, uniform=uniform, **options)
        return [token_ids.double(), turn.double()]

    def reference() -> Results:
        logits, uniform = inputs(torch.device("cpu"), torch.float64)
        chosen = choose_token_ref(logits, vocab_size=61, uniform=uniform[0], **options)
        return [chosen.double(), torch.ones(3, dtype=torch.float64)]

    return Case(operation, choose, reference)


def _packed_case(operation: str) -> Case:
    """Heads of every format through a whole window, packed before and unpacked behind it.

    Without decay and with small multiples of 1/8 no sum is rounded, so that every backend has to come to the
    same codes.
    """
    nheads, headdim, d_state, window = len(STATE_DTYPES), 8, 32, 4
    d_ssm = nheads * headdim

    def run(device: torch.device, dtype: torch.dtype) -> Results:
        generator = torch.Generator().manual_seed(0)
        shape = (window, 2, 2 * d_ssm + 2 * d_state + nheads)
        rows = (torch.randint(-16, 17, shape, generator=generator) / 8).to(device, dtype)
        packed = empty_packed_state(
            LayerFormat(STATE_DTYPES, window=window), 2, nheads, headdim, d_state, 1, dtype, device
        )
        packed.pack_(torch.zeros(2, nheads, headdim, d_state, device=device), 0)
        zeros = torch.zeros(nheads, device=device)
        outputs = []
        for row in rows:
            out = NormBuffers.empty(2, d_ssm, dtype, device)
            normed = packed_ssm_step(
                row, packed, zeros, zeros - torch.inf, zeros, None, 0.0, out, ngroups=1, dt_limit=(0.5, 0.5)
            )
            advance_positions([packed])
            outputs.append(normed.scaled)
        return [*outputs, packed.unpack(zeros)]

    def reference() -> Results:
        return [result.double() for result in run(torch.device("cpu"), torch.float64)]

    return Case(operation, run, reference)


def _prepared_case(operation: str) -> Case:
    """A whole window of a layer whose in_proj is the library's product: the convolution prepares the step."""
    nheads, headdim, d_state, d_model, window = 2, 8, 16, 24, 4
    d_ssm, conv_dim = nheads * headdim, nheads * headdim + 2 * d_state

    def run(device: torch.device, dtype: torch.dtype) -> Results:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        packed = empty_packed_state(
            LayerFormat(("fp32",) * nheads, window=window), 2, nheads, headdim, d_state, 1, dtype, device
        )
        weight, conv_weight, conv_bias = random(d_ssm + conv_dim + nheads, d_model), random(conv_dim, 4), None
        dt_bias, A_log, D = random(nheads), random(nheads), random(nheads)
        conv_state, row = random(2, conv_dim, 4), random(2, len(weight))
        outputs = []
        for _ in range(window):
            out = NormBuffers.empty(2, d_ssm, dtype, device)
            in_proj_step(
                Normed(random(2, d_model), None, 0.0), weight, None, conv_state, conv_weight, conv_bias, row,
                d_ssm=d_ssm, prepare=Preparation(packed, dt_bias, A_log),
            )  # fmt: skip
            normed = packed_ssm_step(row, packed, dt_bias, A_log, D, None, 0.0, out, ngroups=1, prepared=True)
            advance_positions([packed])
            outputs.append(normed.scaled)
        return [*outputs, conv_state, packed.unpack(-A_log.exp())]

    def reference() -> Results:
        return [result.double() for result in run(torch.device("cpu"), torch.float64)]

    return Case(operation, run, reference)


def _packed_mamba1_case(operation: str) -> Case:
    """A whole window of a Mamba-1 layer's state in int8, exact for the same reasons."""
    dim, d_state, window = 24, 16, 4

    def run(device: torch.device, dtype: torch.dtype) -> Results:
        generator = torch.Generator().manual_seed(0)
        shape = (window, 2, dim + 2 * d_state)
        rows = (torch.randint(-16, 17, shape, generator=generator) / 8).to(device, dtype)
        packed = empty_packed_state(
            LayerFormat(("int8",), window=window), 2, 1, dim, d_state, 1, dtype, device, dt_per_row=True
        )
        A = torch.zeros(dim, d_state, device=device)
        outputs = []
        for row in rows:
            x, B, C = row.split([dim, d_state, d_state], 1)
            outputs.append(packed_selective_update(packed, x, torch.full_like(x, 0.5), A, B, C))
            advance_positions([packed])
        return [*outputs, packed.unpack(A)]

    def reference() -> Results:
        return [result.double() for result in run(torch.device("cpu"), torch.float64)]

    return Case(operation, run, reference)


CONV = dict(x=(2, 24, 19), weight=(24, 4), bias=(24,), initial_states=(2, 24, 3))
CONV_UPDATE = dict(x=(2, 24), conv_state=(2, 24, 4), weight=(24, 4), bias=(24,))
CHUNK_SCAN = dict(
    x=(1, 37, 2, 16), dt=(1, 37, 2), A=(2,), B=(1, 37, 1, 16), C=(1, 37, 1, 16), D=(2,), z=(1, 37, 2, 16),
    dt_bias=(2,), initial_states=(1, 2, 16, 16),
)  # fmt: skip
STATE_UPDATE = dict(
    state=(2, 2, 16, 16), x=(2, 2, 16), dt=(2, 2, 16), A=(2, 16, 16), B=(2, 1, 16), C=(2, 1, 16), D=(2, 16),
    z=(2, 2, 16), dt_bias=(2, 16),
)  # fmt: skip
SELECTIVE_SCAN = dict(
    u=(1, 8, 21), delta=(1, 8, 21), A=(8, 4), B=(1, 4, 21), C=(1, 4, 21), D=(8,), z=(1, 8, 21),
    delta_bias=(8,), initial_state=(1, 8, 4),
)  # fmt: skip

CASES = (
    *_cases(
        "causal_conv1d_fn", causal_conv1d_fn, causal_conv1d_ref, CONV, differentiable=True,
        activation="silu", return_final_states=True,
    ),
    *_cases(
        "causal_conv1d_update", causal_conv1d_update, causal_conv1d_update_ref, CONV_UPDATE,
        updates="conv_state", activation="silu",
    ),
    *_cases(
        "mamba_chunk_scan_combined", mamba_chunk_scan_combined, _scan_recurrently, CHUNK_SCAN,
        differentiable=True, chunk_size=16, dt_softplus=True, return_final_states=True,
    ),
    *_cases(
        "rmsnorm_fn", rmsnorm_fn, rmsnorm_ref, dict(x=(3, 32), weight=(32,), bias=(32,), z=(3, 32)),
        differentiable=True, group_size=16, norm_before_gate=False,
    ),
    *_cases(
        "add_norm_fn", add_norm_fn, add_norm_ref,
        dict(x=(3, 32), residual=(3, 32), weight=(32,), bias=(32,)),
    ),
    *_cases(
        "selective_state_update", selective_state_update, selective_state_update_ref, STATE_UPDATE,
        updates="state", dt_softplus=True,
    ),
    *_cases(
        "selective_scan_fn", selective_scan_fn, selective_scan_ref, SELECTIVE_SCAN, differentiable=True,
        delta_softplus=True, return_last_state=True,
    ),
    _decode_case("fused decode step", batch=2),
    *_cases("projection of 16 rows", _project, _project_ref, dict(x=(16, 40), weight=(24, 40))),
    # Not bfloat16, which a CPU's linear layers keep in a layout of their own.
    _decode_case("fused decode step, batch 16", batch=16, dtype=torch.float16),
    _decode_case("fused decode step, Mamba-1", batch=2, config=TINY_MAMBA1),
    _packed_case("packed_ssm_step"),
    _prepared_case("packed_ssm_step behind in_proj"),
    _packed_mamba1_case("packed_selective_update"),
    _choice_case("choose_token, greedy"),
    _choice_case("choose_token", temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    _choice_case("choose_token, top_p alone", temperature=0.8, top_p=0.9),
)  # fmt: skip
