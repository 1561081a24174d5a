"""The attention mixer of hybrid models (mamba_ssm's MHA): grouped heads, optional convolution and MLP."""

import torch
import torch.nn.functional as F

from mamba_cli.config import AttentionConfig
from mamba_cli.linear import Linear
from mamba_cli.mamba2 import advance_window
from mamba_cli.state import AttentionState, wide_dtype
from mamba_cli.weights import Weights
from mamba_kernels.causal_conv1d import causal_conv1d_fn


class AttentionMixer:
    """One attention layer: u (batch, seqlen, d_model) -> the same shape, with a growing KV cache."""

    def __init__(self, config: AttentionConfig, weights: Weights):
        self.config = config
        self.in_proj = Linear(weights("in_proj.weight"), weights.optional("in_proj.bias"))
        self.conv_weight = weights("conv1d.weight").squeeze(1) if config.d_conv else None
        self.conv_bias = weights.optional("conv1d.bias")
        self.out_proj = Linear(weights("out_proj.weight"), weights.optional("out_proj.bias"))

    def prefill(self, u: torch.Tensor, state: AttentionState) -> torch.Tensor:
        """Read seqlen tokens; `state` is updated in place."""
        start, seqlen = state.length, u.shape[1]
        positions = torch.arange(start, start + seqlen, device=u.device)
        q, k, v, mlp = self._project(u, positions, state)
        k, v = state.append(k, v)
        mask = None
        if start and seqlen > 1:  # one query sees all keys, and a first block is plainly causal
            mask = torch.arange(start + seqlen, device=u.device) <= positions[:, None]
        return self._attend(q, k, v, mlp, mask, is_causal=start == 0)

    def step(self, u: torch.Tensor, state: AttentionState) -> torch.Tensor:
        """Read one token, u (batch, d_model); `state` is updated in place."""
        if state.position is None:
            return self.prefill(u[:, None], state)[:, 0]
        # Captured: shapes cannot grow, so all of the cache takes part and a mask hides what is not filled.
        q, k, v, mlp = self._project(u[:, None], state.position[None], state)
        keys, values = state.kv
        keys.index_copy_(2, state.position[None], k)
        values.index_copy_(2, state.position[None], v)
        mask = torch.arange(state.capacity, device=u.device)[None] <= state.position
        y = self._attend(q, keys, values, mlp, mask)
        state.position.add_(1)
        return y[:, 0]

    def _project(
        self, u: torch.Tensor, positions: torch.Tensor, state: AttentionState
    ) -> tuple[torch.Tensor, ...]:
        """Return q, k, v (batch, heads, seqlen, head_dim), rotated, and what the MLP beside them gives."""
        config = self.config
        qkv, up, gate = self.in_proj(u).split(
            (config.qkv_dim, config.mlp_dim // 2, config.mlp_dim // 2), dim=-1
        )
        if self.conv_weight is not None:
            qkv = self._convolve(qkv.transpose(1, 2), state).transpose(1, 2)
        heads = qkv.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        q, k, v = heads.split((config.num_heads, config.num_heads_kv, config.num_heads_kv), dim=1)
        if config.rotary_emb_dim:
            cos, sin = rotary_tables(config, positions, wide_dtype(u.dtype))
            q, k = rotate(q, cos, sin, config), rotate(k, cos, sin, config)
        return q, k, v, up * F.silu(gate)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mlp: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        config = self.config
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal,
            scale=config.softmax_scale,
            enable_gqa=config.num_heads != config.num_heads_kv,
        )
        y = y.transpose(1, 2).flatten(-2)
        return self.out_proj(torch.cat([y, mlp], -1) if config.mlp_dim else y)

    def _convolve(self, x: torch.Tensor, state: AttentionState) -> torch.Tensor:
        # The window holds the values before the convolution; mamba_ssm's own prefill stores those
        # after it, so that its first decoded tokens are wrong.
        assert state.conv is not None
        y = causal_conv1d_fn(x, self.conv_weight, self.conv_bias, initial_states=state.conv[..., 1:])
        advance_window(state.conv, x)
        return y


def rotary_tables(
    config: AttentionConfig, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin (seqlen, rotary_emb_dim / 2) of positions (seqlen,) (Su et al. 2021)."""
    even = torch.arange(0, config.rotary_emb_dim, 2, dtype=dtype, device=positions.device)
    frequency = config.rotary_emb_base ** (-even / config.rotary_emb_dim)
    angle = positions[:, None].to(dtype) * frequency
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, config: AttentionConfig) -> torch.Tensor:
    """Rotate the first rotary_emb_dim elements of each head of x (batch, heads, seqlen, head_dim)."""
    turned, rest = x.split((config.rotary_emb_dim, x.shape[-1] - config.rotary_emb_dim), -1)
    # Pairs are (i, i + half), or neighbours (2i, 2i + 1) where interleaved.
    pairs = turned.unflatten(-1, (-1, 2) if config.rotary_emb_interleaved else (2, -1))
    axis = -1 if config.rotary_emb_interleaved else -2
    a, b = pairs.to(cos.dtype).unbind(axis)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], axis).flatten(-2).to(x.dtype)
    return torch.cat([turned, rest], -1)
