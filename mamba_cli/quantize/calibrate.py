"""What a text tells of a model's memory: how long each head remembers, and the shape of its state."""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from mamba_cli.language_model import LanguageModel
from mamba_cli.mamba1 import Mamba1Mixer
from mamba_cli.mamba2 import Mamba2Mixer
from mamba_cli.perplexity.plan import Plan
from mamba_cli.quantize.saved import Scales
from mamba_cli.state import SSMState
from mamba_kernels.backend import use_backend
from mamba_kernels.causal_conv1d import causal_conv1d_fn

# Tokens read between two looks at the states.
BLOCK = 128
# A column scale stays within this factor of its row's mean: a column that is all but empty on one text
# may well be used by the next.
COLUMN_RANGE = 64.0


def built_in_text() -> str:
    """Return the text for a user who names none: a story, prose, lists and code in 1,300 English words."""
    return Path(__file__).with_name("calibration.txt").read_text(encoding="utf-8")


@torch.inference_mode()
def calibrate(
    lm: LanguageModel, plan: Plan, advance: Callable[[int], object] = lambda tokens: None
) -> Scales:
    """Read the plan's windows, and return what was seen of each layer.

    lm keeps its state in fp32. A head's half-life is ln 2 / (dt exp(A_log)) with its mean dt on the text:
    the state decays by exp(dt A) a token (Gu and Dao 2023, arXiv:2312.00752, equation 4), so the mean rate
    is what a stretch of text amounts to. A column's scale is the root mean square of that column of the
    state's rows, each brought to length one, over the geometric mean of its head's columns.
    """
    with _observed(lm) as observers, use_backend(lm.backend):
        for window in plan.windows:
            ids = plan.documents[window.document].ids[None, window.start : window.stop].to(lm.device)
            state = lm.init_state(1)
            for block in ids.split(BLOCK, 1):
                lm.model.prefill(block, state)
                for index, observer in observers.items():
                    observer.look(state.layers[index])
                advance(block.shape[1])

    def of_each_layer(read: Callable[[_Observer], torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        layers = range(lm.config.n_layer)
        return tuple(read(observers[index]) if index in observers else None for index in layers)

    return Scales(
        half_lives=of_each_layer(_Observer.half_lives),
        columns=of_each_layer(_Observer.columns),
        conv=of_each_layer(_Observer.conv_peaks),
    )


class _Observer:
    """Stands in for a mixer of one layer, and keeps sums of what passes through it."""

    def __init__(self, mixer: Mamba1Mixer | Mamba2Mixer):
        self.mixer = mixer
        self.tokens = 0
        self.dt = torch.zeros(())
        self.conv = torch.zeros(())
        self.squares = torch.zeros(())

    def prefill(self, u: torch.Tensor, state: SSMState) -> torch.Tensor:
        read = _read_mamba2 if isinstance(self.mixer, Mamba2Mixer) else _read_mamba1
        conv, dt = read(self.mixer, u, state)
        dt = F.softplus(dt.float() + self.mixer.dt_bias.float()).clamp(*self.mixer.config.dt_limit)
        self.tokens += dt.shape[0] * dt.shape[1]
        self.dt = self.dt.to(dt.device) + dt.double().sum((0, 1))
        self.conv = torch.maximum(self.conv.to(conv), conv.abs().amax((0, 1)))
        return self.mixer.prefill(u, state)

    def look(self, state: SSMState) -> None:
        """Add up the squares of the state's rows: (heads, d_state), one head for Mamba-1."""
        ssm = state.ssm if state.ssm.dim() == 4 else state.ssm[:, None]
        # Rows of length one: each is rounded relative to its own scale, so that a small row counts as much.
        rows = F.normalize(ssm.double(), dim=-1, eps=torch.finfo(torch.float32).tiny)
        self.squares = self.squares.to(ssm.device) + rows.square().sum((0, 2))

    def half_lives(self) -> torch.Tensor:
        """(nheads,), or (d_inner, d_state) for Mamba-1; fp32 on the CPU, infinite where nothing decays."""
        rate = self.mixer.A.double().abs()
        dt = self.dt / self.tokens
        return (math.log(2) / (rate * dt.reshape(-1, *[1] * (rate.dim() - 1)))).float().cpu()

    def conv_peaks(self) -> torch.Tensor:
        """(conv_dim,), fp32 on the CPU."""
        return self.conv.float().cpu()

    def columns(self) -> torch.Tensor:
        """(heads, d_state), fp32 on the CPU."""
        logs = 0.5 * self.squares.clamp(min=torch.finfo(torch.float32).tiny).log()
        limit = math.log(COLUMN_RANGE)
        return (logs - logs.mean(-1, keepdim=True)).clamp(-limit, limit).exp().float().cpu()


def _read_mamba2(mixer: Mamba2Mixer, u: torch.Tensor, state: SSMState) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what goes into the convolution (batch, seqlen, conv_dim), and dt before its bias."""
    *_, xBC, dt = mixer._split(mixer.in_proj(u))
    return xBC, dt


def _read_mamba1(mixer: Mamba1Mixer, u: torch.Tensor, state: SSMState) -> tuple[torch.Tensor, torch.Tensor]:
    x = mixer.in_proj(u).transpose(1, 2).chunk(2, 1)[0]
    conv = causal_conv1d_fn(
        x, mixer.conv_weight, mixer.conv_bias, initial_states=state.conv[..., 1:], activation="silu"
    )
    return x.transpose(1, 2), mixer._project(conv.transpose(1, 2))[0]


@contextlib.contextmanager
def _observed(lm: LanguageModel) -> Iterator[dict[int, _Observer]]:
    """Put an observer before every Mamba layer inside the block; yield them by layer."""
    blocks = lm.model.blocks
    observers = {
        index: _Observer(block.mixer)
        for index, block in enumerate(blocks)
        if index not in lm.config.attn_layer_idx
    }
    for index, observer in observers.items():
        blocks[index].mixer = observer
    try:
        yield observers
    finally:
        for index, observer in observers.items():
            blocks[index].mixer = observer.mixer
