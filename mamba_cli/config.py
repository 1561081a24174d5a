"""The one canonical configuration, in mamba_ssm's terms. Every format translates to and from it.

A field without a default has none anywhere: a format must find its value in the checkpoint's own
configuration, or in the defaults of the format's own library where that library defines them.
"""

import math
from dataclasses import dataclass

from mamba_cli.errors import Mamba2Error

LARGEST_FP32 = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True)
class AttentionConfig:
    """Attention layers of a hybrid model (mamba_ssm's `attn_cfg`). Always causal.

    d_conv 0 means no convolution over q, k, v. mlp_dim counts in_proj's rows [up, gate] of the gated
    MLP beside the heads, already rounded as stored; 0 for none. rotary_emb_dim is the rotated part
    of each head, 0 for none.
    """

    num_heads: int
    num_heads_kv: int
    head_dim: int
    d_conv: int
    mlp_dim: int
    qkv_proj_bias: bool
    out_proj_bias: bool
    softmax_scale: float
    rotary_emb_dim: int
    rotary_emb_base: float
    rotary_emb_interleaved: bool

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_heads_kv", "head_dim"):
            _positive(f"attn_cfg.{name}", getattr(self, name))
        _divides("attn_cfg.num_heads_kv", self.num_heads_kv, "num_heads", self.num_heads)
        if not 0 <= self.rotary_emb_dim <= self.head_dim or self.rotary_emb_dim % 2:
            raise Mamba2Error(
                f"attn_cfg.rotary_emb_dim: expected an even number up to head_dim {self.head_dim}, "
                f"got {self.rotary_emb_dim}"
            )
        for name in ("softmax_scale", "rotary_emb_base"):
            _positive_fp32(f"attn_cfg.{name}", getattr(self, name))

    @property
    def qkv_dim(self) -> int:
        """Rows of in_proj that hold q, k and v."""
        return self.head_dim * (self.num_heads + 2 * self.num_heads_kv)


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions and switches of a Mamba-2 (or Mamba-1) language model.

    vocab_size counts the real tokens and vocab_rows the rows of the embedding, padding included.
    d_inner is the mixer's width, d_ssm the part of it that passes through the SSM (the rest is a
    gated MLP). norm_eps serves the block norms, gated_norm_eps the norm inside the mixer.
    mlp_dim is the width of the MLP after each mixer, already rounded as stored; 0 for none.
    For layer "Mamba1": ngroups and headdim are 1, dt_rank is set, bcdt_norm_eps is FalconMamba's
    epsilon of the norms on B, C and dt, None where there are none.
    """

    layer: str  # "Mamba2" or "Mamba1"
    d_model: int
    n_layer: int
    vocab_size: int
    vocab_rows: int
    d_state: int
    d_conv: int
    d_inner: int
    d_ssm: int
    headdim: int
    ngroups: int
    chunk_size: int
    D_has_hdim: bool
    rmsnorm: bool
    norm_before_gate: bool
    dt_limit: tuple[float, float]
    bias: bool
    conv_bias: bool
    rms_norm: bool
    norm_eps: float
    gated_norm_eps: float
    residual_in_fp32: bool
    tie_embeddings: bool
    mlp_dim: int = 0
    attn_layer_idx: tuple[int, ...] = ()
    attention: AttentionConfig | None = None
    dt_rank: int = 0
    bcdt_norm_eps: float | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.layer not in ("Mamba1", "Mamba2"):
            raise Mamba2Error(f"layer: expected Mamba1 or Mamba2, got {self.layer}")
        sizes = "d_model n_layer vocab_size d_state d_inner d_ssm headdim ngroups chunk_size"
        for name in sizes.split():
            _positive(name, getattr(self, name))
        for name in ("norm_eps", "gated_norm_eps"):
            _positive_fp32(name, getattr(self, name))
        if self.bcdt_norm_eps is not None:
            _positive_fp32("bcdt_norm_eps", self.bcdt_norm_eps)
        if not 2 <= self.d_conv <= 4:
            raise Mamba2Error(f"d_conv: expected 2 to 4, got {self.d_conv}")
        if self.vocab_rows < self.vocab_size:
            raise Mamba2Error(
                f"embedding rows: expected at least vocab_size {self.vocab_size}, got {self.vocab_rows}"
            )
        if self.d_ssm > self.d_inner:
            raise Mamba2Error(f"d_ssm: expected at most d_inner {self.d_inner}, got {self.d_ssm}")
        if self.layer == "Mamba2":
            _divides("headdim", self.headdim, "d_ssm", self.d_ssm)
            _divides("ngroups", self.ngroups, "nheads", self.nheads)
        else:
            _positive("dt_rank", self.dt_rank)
        low, high = self.dt_limit
        if math.isnan(low) or math.isnan(high) or low > high:
            raise Mamba2Error(f"dt_limit: expected a lower and a higher bound, got {self.dt_limit}")
        for index in self.attn_layer_idx:
            if not 0 <= index < self.n_layer:
                raise Mamba2Error(f"attn_layer_idx: expected below n_layer {self.n_layer}, got {index}")
        if self.attn_layer_idx and self.attention is None:
            raise Mamba2Error("attn_cfg: expected num_heads for the attention layers, got nothing")

    @property
    def nheads(self) -> int:
        """Heads of the SSM; 0 heads never occur. For Mamba-1, d_inner channels of headdim 1."""
        return self.d_ssm // self.headdim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: x, B and C (Mamba-1: x alone)."""
        return self.d_ssm + (2 * self.ngroups * self.d_state if self.layer == "Mamba2" else 0)

    @property
    def d_mlp(self) -> int:
        """Width of the gated-MLP branch inside a Mamba-2 mixer: in_proj's z0 and x0."""
        return self.d_inner - self.d_ssm

    @property
    def in_proj_dim(self) -> int:
        """Rows of a mixer's in_proj: [z0, x0, z, x, B, C, dt], or [x, z] for Mamba-1."""
        if self.layer == "Mamba1":
            return 2 * self.d_inner
        return 2 * self.d_mlp + self.d_ssm + self.conv_dim + self.nheads


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Mamba2Error(f"{name}: expected a positive integer, got {value!r}")


def _positive_fp32(name: str, value: float) -> None:
    if not 0 < value <= LARGEST_FP32:
        raise Mamba2Error(f"{name}: expected a positive number that fp32 can hold, got {value}")


def _divides(name: str, value: int, of: str, total: int) -> None:
    if total % value:
        raise Mamba2Error(f"{name}: expected a divisor of {of} {total}, got {value}")
