"""What a model remembers of the tokens it has read: convolution windows, SSM states, KV caches."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mamba_cli.config import ModelConfig


@dataclass
class SSMState:
    """Memory of one Mamba layer.

    conv: (batch, conv_dim, d_conv), newest column last, in the model's dtype, channels adjacent in
    memory. ssm: (batch, nheads, headdim, d_state), or (batch, d_inner, d_state) for Mamba-1.
    """

    conv: torch.Tensor
    ssm: torch.Tensor

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.conv
        yield self.ssm

    def map(self, change) -> "SSMState":
        return SSMState(change(self.conv), change(self.ssm))


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

    def map(self, change) -> "AttentionState":
        conv = None if self.conv is None else change(self.conv)
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
        return (first.ssm if isinstance(first, SSMState) else first.kv[0]).shape[0]

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
        # All SSM states in one call: a launch for each would take longer than the copying.
        of_ssm = [pair for pair in pairs if isinstance(pair[0], SSMState)]
        torch._foreach_copy_(
            [tensor for mine, _ in of_ssm for tensor in mine.tensors()],
            [tensor for _, theirs in of_ssm for tensor in theirs.tensors()],
        )
        self.seqlen = other.seqlen

    def _map(self, change) -> "State":
        return State([layer.map(_keeping_layout(change)) for layer in self.layers], self.seqlen)


def init_state(
    config: ModelConfig,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    ssm_dtype: torch.dtype | None = None,
) -> State:
    """Return the state before any token: zeros.

    dtype: the model's; ssm_dtype: of the SSM states, by default fp32, or float64 for such a model.
    """
    ssm_dtype = ssm_dtype or wide_dtype(dtype)
    layers: list[SSMState | AttentionState] = []
    for index in range(config.n_layer):
        if index in config.attn_layer_idx:
            layers.append(_attention_state(config, batch, dtype, device))
        else:
            heads = (config.d_inner,) if config.layer == "Mamba1" else (config.nheads, config.headdim)
            ssm = torch.zeros(batch, *heads, config.d_state, dtype=ssm_dtype, device=device)
            layers.append(SSMState(conv_window(batch, config.conv_dim, config.d_conv, dtype, device), ssm))
    return State(layers)


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


def _keeping_layout(change):
    """Apply `change` to a conv window in its memory order: repeat_interleave would reorder it."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 3 and tensor.stride(1) == 1:
            return change(tensor.transpose(1, 2)).transpose(1, 2)
        return change(tensor)

    return changed
