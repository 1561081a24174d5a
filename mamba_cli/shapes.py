"""The published Mamba-2 shapes, for measuring without their weights."""

import math

from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error

# name: (d_model, n_layer), as published by state-spaces; all have headdim 64, d_state 128, one group.
PUBLISHED = {
    "130m": (768, 24),
    "370m": (1024, 48),
    "780m": (1536, 48),
    "1.3b": (2048, 48),
    "2.7b": (2560, 64),
}


def published_config(name: str) -> ModelConfig:
    """Return the configuration of state-spaces/mamba2-NAME."""
    if name not in PUBLISHED:
        raise Mamba2Error(f"shape: expected one of {', '.join(PUBLISHED)}, got {name}")
    d_model, n_layer = PUBLISHED[name]
    return ModelConfig(
        layer="Mamba2",
        d_model=d_model,
        n_layer=n_layer,
        vocab_size=50277,
        vocab_rows=50288,
        d_state=128,
        d_conv=4,
        d_inner=2 * d_model,
        d_ssm=2 * d_model,
        headdim=64,
        ngroups=1,
        chunk_size=256,
        D_has_hdim=False,
        rmsnorm=True,
        norm_before_gate=False,
        dt_limit=(0.0, math.inf),
        bias=False,
        conv_bias=True,
        rms_norm=True,
        norm_eps=1e-5,
        gated_norm_eps=1e-5,
        residual_in_fp32=True,
        tie_embeddings=True,
    )
