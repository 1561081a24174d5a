"""What a model remembers of the tokens it has read: convolution windows, SSM states, KV caches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mamba_cli.config import ModelConfig
from mamba_cli.conv_window import decode_window, encode_window_, storage_dtype
from mamba_cli.state_format import StateFormat
from mamba_kernels.packed_state import LayerFormat, PackedState, empty_packed_state

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class SSMState:
    """Memory of one Mamba layer.

    conv: (batch, conv_dim, d_conv), newest column last, in the model's dtype or as codes of fewer bits,
    channels adjacent in memory. ssm: (batch, nheads, headdim, d_state), or (batch, d_inner, d_state) for
    Mamba-1; or the same packed, for Mamba-1 as one head of d_inner rows. conv_scales: (conv_dim,) of
    conv's codes, static; None where they have none.
    """

    conv: torch.Tensor
    ssm: torch.Tensor | PackedState
    conv_scales: torch.Tensor | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.conv
        if isinstance(self.ssm, PackedState):
            yield from self.ssm.tensors()
        else:
            yield self.ssm

    def map(self, change: Change) -> "SSMState":
        ssm = self.ssm.map(change) if isinstance(self.ssm, PackedState) else change(self.ssm)
        return SSMState(_change_window(self.conv, change), ssm, self.conv_scales)

    @contextmanager
    def opened_window(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Give the convolution's window in the model's dtype; the block moves it on in place."""
        if self.conv.dtype == dtype:
            yield self.conv
            return
        window = decode_window(self.conv, self.conv_scales, dtype)
        yield window
        encode_window_(self.conv, window, self.conv_scales)

    @contextmanager
    def opened(self, A: torch.Tensor, tokens: int) -> Iterator[torch.Tensor]:
        """Give the SSM state as a tensor, into which the block then reads `tokens` tokens in place.

        A packed state is unpacked, to float32, and packed again after the block. A: (nheads,), or
        (d_inner, d_state) for Mamba-1, negative.
        """
        if not isinstance(self.ssm, PackedState):
            yield self.ssm
            return
        ssm = self.ssm.unpack(A)
        yield ssm
        self.ssm.pack_(ssm, self.ssm.position + tokens)


@dataclass
class AttentionState:
    """Memory of one attention layer: a KV cache that grows with the text.

    conv: (batch, qkv_dim, d_conv) values before the convolution, or None where there is none.
    kv: (2, batch, num_heads_kv, capacity, head_dim); the first `length` positions are filled.
    position: `length` once more, int64 () on the device, where steps are captured in a CUDA graph,
    which can read no Python number; None elsewhere.
    """

    conv: torch.Tensor | None
    kv: torch.Tensor
    length: int = 0
    position: torch.Tensor | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        if self.conv is not None:
            yield self.conv
        yield self.kv

    def map(self, change: Change) -> "AttentionState":
        conv = None if self.conv is None else _change_window(self.conv, change)
        return AttentionState(conv, torch.stack([change(half) for half in self.kv]), self.length)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add k, v (batch, num_heads_kv, seqlen, head_dim); return all keys and values so far."""
        end = self.length + k.shape[2]
        if end > self.capacity:
            # Doubling keeps the copying linear in the length of the text.
            self.reserve(max(end, 2 * self.capacity, 64))
        self.kv[0, :, :, self.length : end] = k
        self.kv[1, :, :, self.length : end] = v
        self.length = end
        return self.kv[0, :, :, :end], self.kv[1, :, :, :end]

    @property
    def capacity(self) -> int:
        """Positions that fit without growing."""
        return self.kv.shape[3]

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions in all."""
        grown = self.kv.new_zeros(*self.kv.shape[:3], capacity, self.kv.shape[4])
        grown[:, :, :, : self.length] = self.kv[:, :, :, : self.length]
        self.kv = grown

    def copy_(self, other: "AttentionState") -> None:
        """Take over the memory of `other`, which fits, in place."""
        if self.conv is not None:
            self.conv.copy_(other.conv)
        self.kv[:, :, :, : other.length] = other.kv[:, :, :, : other.length]
        self.length = other.length
        if self.position is not None:
            self.position.fill_(other.length)


@dataclass
class State:
    """Memory of a whole model for a batch of sequences; `seqlen` tokens have gone into it."""

    layers: list[SSMState | AttentionState]
    seqlen: int = 0
    graph: Any = field(default=None, repr=False)  # the captured step that advances this state, if any

    @property
    def batch(self) -> int:
        first = self.layers[0]
        return (first.conv if isinstance(first, SSMState) else first.kv[0]).shape[0]

    @property
    def packed(self) -> list[PackedState]:
        """The packed SSM states, in the layers' order."""
        states = (layer.ssm for layer in self.layers if isinstance(layer, SSMState))
        return [ssm for ssm in states if isinstance(ssm, PackedState)]

    @property
    def nbytes(self) -> int:
        """Bytes held by all the tensors."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())

    def clone(self) -> "State":
        """Return a copy that shares nothing with this state."""
        return self._map(torch.clone)

    def repeat(self, count: int) -> "State":
        """Return a state of `count` copies of each sequence, copies of one sequence adjacent."""
        return self._map(lambda tensor: tensor.repeat_interleave(count, 0))

    def copy_(self, other: "State") -> None:
        """Take over the memory of `other`, of the same batch, in place."""
        pairs = list(zip(self.layers, other.layers, strict=True))
        for mine, theirs in pairs:
            if isinstance(mine, AttentionState):
                mine.copy_(theirs)
        # All tensors of one dtype in one call: a launch for each would take longer than the copying.
        by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for mine, theirs in pairs:
            if isinstance(mine, SSMState):
                for tensor, source in zip(mine.tensors(), theirs.tensors(), strict=True):
                    targets, sources = by_dtype.setdefault(tensor.dtype, ([], []))
                    targets.append(tensor)
                    sources.append(source)
        for targets, sources in by_dtype.values():
            torch._foreach_copy_(targets, sources)
        self.seqlen = other.seqlen

    def _map(self, change: Change) -> "State":
        return State([layer.map(change) for layer in self.layers], self.seqlen)


def init_state(
    config: ModelConfig,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    ssm_dtype: torch.dtype | None = None,
    state_format: StateFormat | None = None,
    columns: Sequence[torch.Tensor | None] | None = None,
    conv_scales: Sequence[torch.Tensor | None] | None = None,
) -> State:
    """Return the state before any token: zeros.

    dtype: the model's. ssm_dtype: of SSM states that are plain tensors, by default fp32, or float64 for
    such a model. state_format: makes them packed states instead. columns, conv_scales: of each layer, the
    static scales (nheads, d_state) of a packed state and (conv_dim,) of a convolution's window, or None.
    """
    conv_dtype = storage_dtype(state_format.conv, dtype) if state_format else dtype
    layers: list[SSMState | AttentionState] = []
    for index in range(config.n_layer):
        if index in config.attn_layer_idx:
            layers.append(_attention_state(config, batch, dtype, device))
            continue
        if state_format is None:
            heads = (config.d_inner,) if config.layer == "Mamba1" else (config.nheads, config.headdim)
            ssm = torch.zeros(
                batch, *heads, config.d_state, dtype=ssm_dtype or wide_dtype(dtype), device=device
            )
        else:
            static = columns[index] if columns else None
            ssm = _packed_state(config, state_format.layers[index], batch, dtype, device, static)
        conv = conv_window(batch, config.conv_dim, config.d_conv, conv_dtype, device)
        layers.append(SSMState(conv, ssm, conv_scales[index] if conv_scales else None))
    return State(layers)


def _packed_state(
    config: ModelConfig,
    layer_format: LayerFormat | None,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    columns: torch.Tensor | None,
) -> PackedState:
    assert layer_format is not None, "a Mamba layer has a format"
    mamba1 = config.layer == "Mamba1"
    return empty_packed_state(
        layer_format,
        batch,
        1 if mamba1 else config.nheads,
        config.d_inner if mamba1 else config.headdim,
        config.d_state,
        config.ngroups,
        dtype,
        device,
        columns,
        dt_per_row=mamba1,
    )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, norms and SSM states in a model of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def conv_window(
    batch: int, channels: int, width: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return zeros (batch, channels, width) with the channels adjacent in memory."""
    return torch.zeros(batch, width, channels, dtype=dtype, device=device).transpose(1, 2)


def _attention_state(
    config: ModelConfig, batch: int, dtype: torch.dtype, device: torch.device
) -> AttentionState:
    attention = config.attention
    assert attention is not None
    conv = None
    if attention.d_conv:
        conv = conv_window(batch, attention.qkv_dim, attention.d_conv, dtype, device)
    kv = torch.zeros(2, batch, attention.num_heads_kv, 0, attention.head_dim, dtype=dtype, device=device)
    return AttentionState(conv, kv)


def _change_window(window: torch.Tensor, change: Change) -> torch.Tensor:
    """Change a conv window in its memory order: repeat_interleave would reorder it."""
    return change(window.transpose(1, 2)).transpose(1, 2)
