"""The published Mamba-2 and Mamba-1 shapes, for measuring without their weights."""

import math
from typing import Any

from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error

# name: (d_model, n_layer), as published by state-spaces.
PUBLISHED = {
    "130m": (768, 24),
    "370m": (1024, 48),
    "780m": (1536, 48),
    "1.3b": (2048, 48),
    "2.7b": (2560, 64),
    "mamba1-130m": (768, 24),
    "mamba1-370m": (1024, 48),
    "mamba1-790m": (1536, 48),
    "mamba1-1.4b": (2048, 48),
    "mamba1-2.8b": (2560, 64),
}


def published_config(name: str) -> ModelConfig:
    """Return the configuration of state-spaces/mamba2-NAME, or of mamba-NAME for "mamba1-NAME"."""
    if name not in PUBLISHED:
        raise Mamba2Error(f"shape: expected one of {', '.join(PUBLISHED)}, got {name}")
    d_model, n_layer = PUBLISHED[name]
    layer = _mamba1(d_model) if name.startswith("mamba1-") else _mamba2()
    return ModelConfig(
        d_model=d_model,
        n_layer=n_layer,
        vocab_size=50277,
        d_conv=4,
        d_inner=2 * d_model,
        d_ssm=2 * d_model,
        ngroups=1,
        chunk_size=256,
        D_has_hdim=False,
        norm_before_gate=False,
        dt_limit=(0.0, math.inf),
        bias=False,
        conv_bias=True,
        rms_norm=True,
        norm_eps=1e-5,
        gated_norm_eps=1e-5,
        residual_in_fp32=True,
        tie_embeddings=True,
        **layer,
    )


def _mamba2() -> dict[str, Any]:
    return {"layer": "Mamba2", "vocab_rows": 50288, "d_state": 128, "headdim": 64, "rmsnorm": True}


def _mamba1(d_model: int) -> dict[str, Any]:
    return {
        "layer": "Mamba1",
        "vocab_rows": 50280,
        "d_state": 16,
        "headdim": 1,
        "rmsnorm": False,
        "dt_rank": math.ceil(d_model / 16),
    }
