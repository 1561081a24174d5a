"""The attention mixer of hybrid models (mamba_ssm's MHA): grouped heads, optional convolution and MLP."""

import torch
import torch.nn.functional as F
from mamba_kernels.causal_conv1d import causal_conv1d_fn

from mamba_cli.config import AttentionConfig
from mamba_cli.linear import Linear
from mamba_cli.mamba2 import advance_window
from mamba_cli.state import AttentionState, wide_dtype
from mamba_cli.weights import Weights


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
        config = self.config
        qkv, up, gate = self.in_proj(u).split(
            (config.qkv_dim, config.mlp_dim // 2, config.mlp_dim // 2), dim=-1
        )
        if self.conv_weight is not None:
            qkv = self._convolve(qkv.transpose(1, 2), state).transpose(1, 2)
        q, k, v = (
            part.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for part in qkv.split(
                [
                    heads * config.head_dim
                    for heads in (config.num_heads, config.num_heads_kv, config.num_heads_kv)
                ],
                dim=-1,
            )
        )
        start = state.length
        if config.rotary_emb_dim:
            cos, sin = rotary_tables(config, start, q.shape[2], q.dtype, q.device)
            q, k = rotate(q, cos, sin, config), rotate(k, cos, sin, config)
        k, v = state.append(k, v)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_causal_mask(q.shape[2], start, q.device) if start and q.shape[2] > 1 else None,
            is_causal=start == 0,
            scale=config.softmax_scale,
            enable_gqa=config.num_heads != config.num_heads_kv,
        )
        y = y.transpose(1, 2).flatten(-2)
        if config.mlp_dim:
            y = torch.cat([y, up * F.silu(gate)], -1)
        return self.out_proj(y)

    def step(self, u: torch.Tensor, state: AttentionState) -> torch.Tensor:
        """Read one token, u (batch, d_model); `state` is updated in place."""
        return self.prefill(u[:, None], state)[:, 0]

    def _convolve(self, x: torch.Tensor, state: AttentionState) -> torch.Tensor:
        # The window holds the values before the convolution; mamba_ssm's own prefill stores those
        # after it, so that its first decoded tokens are wrong.
        assert state.conv is not None
        y = causal_conv1d_fn(x, self.conv_weight, self.conv_bias, initial_states=state.conv[..., 1:])
        advance_window(state.conv, x)
        return y


def rotary_tables(
    config: AttentionConfig, start: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin (length, rotary_emb_dim / 2) of positions start..start+length (Su et al. 2021)."""
    wide = wide_dtype(dtype)
    exponent = torch.arange(0, config.rotary_emb_dim, 2, dtype=wide, device=device) / config.rotary_emb_dim
    positions = torch.arange(start, start + length, dtype=wide, device=device)
    angle = positions[:, None] * config.rotary_emb_base**-exponent
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


def _causal_mask(length: int, start: int, device: torch.device) -> torch.Tensor:
    """Return (length, start + length): query i sees the `start` past keys and its own block up to i."""
    rows = torch.arange(start, start + length, device=device)[:, None]
    return torch.arange(start + length, device=device) <= rows
