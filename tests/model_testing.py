"""Small configurations that cover everything a state-spaces model can say, and random models of them."""

import dataclasses
import json
from pathlib import Path

from mamba_cli.config import AttentionConfig, ModelConfig
from mamba_cli.load import random_model

DATA = Path(__file__).parent / "data"

BASE = ModelConfig(
    layer="Mamba2",
    d_model=32,
    n_layer=2,
    vocab_size=61,
    vocab_rows=64,
    d_state=16,
    d_conv=4,
    d_inner=64,
    d_ssm=64,
    headdim=16,
    ngroups=1,
    chunk_size=16,
    D_has_hdim=False,
    rmsnorm=True,
    norm_before_gate=False,
    dt_limit=(0.0, float("inf")),
    bias=False,
    conv_bias=True,
    rms_norm=True,
    norm_eps=1e-5,
    gated_norm_eps=1e-5,
    residual_in_fp32=True,
    tie_embeddings=True,
)
HEADS = AttentionConfig(
    num_heads=4,
    num_heads_kv=2,
    head_dim=8,
    d_conv=3,
    mlp_dim=0,
    qkv_proj_bias=False,
    out_proj_bias=False,
    softmax_scale=8**-0.5,
    rotary_emb_dim=4,
    rotary_emb_base=10000.0,
    rotary_emb_interleaved=False,
)


def variant(**changes) -> ModelConfig:
    return dataclasses.replace(BASE, **changes)


def hybrid(**changes) -> ModelConfig:
    attention = dataclasses.replace(HEADS, **changes)
    return variant(n_layer=3, attn_layer_idx=(1,), attention=attention)


VARIANTS = {
    "plain": BASE,
    "groups_between_one_and_nheads": variant(ngroups=2),
    "groups_as_heads": variant(ngroups=4),
    "odd_heads": variant(d_inner=72, d_ssm=72, headdim=24, d_state=20),
    "wide_state": variant(d_state=136),
    "conv_of_two": variant(d_conv=2),
    "conv_of_three": variant(d_conv=3),
    "part_of_the_width_is_ssm": variant(d_ssm=32),
    "D_per_channel": variant(D_has_hdim=True),
    "no_gated_norm": variant(rmsnorm=False),
    "norm_before_gate": variant(norm_before_gate=True, ngroups=2),
    "dt_limited": variant(dt_limit=(0.01, 0.05)),
    "projection_bias": variant(bias=True),
    "no_conv_bias": variant(conv_bias=False),
    "layer_norm": variant(rms_norm=False),
    "residual_in_model_dtype": variant(residual_in_fp32=False),
    "mlp": variant(mlp_dim=128),
    "untied": variant(tie_embeddings=False),
    "everything": variant(
        ngroups=2, d_ssm=32, D_has_hdim=True, bias=True, rms_norm=False, mlp_dim=128, tie_embeddings=False
    ),
    "hybrid": hybrid(),
    "hybrid_without_conv": hybrid(d_conv=0),
    "hybrid_interleaved_rotary": hybrid(rotary_emb_interleaved=True, rotary_emb_dim=8),
    "hybrid_with_mlp_and_biases": hybrid(mlp_dim=256, qkv_proj_bias=True, out_proj_bias=True),
}


def make(config: ModelConfig, dtype: str = "float32", **options):
    return random_model(config, device="cpu", dtype=dtype, **options)


def golden_names() -> list[str]:
    return sorted(path.parent.name for path in DATA.glob("golden/*/expect.safetensors"))


def golden_config(name: str) -> dict:
    return json.loads((DATA / "golden" / name / "config.json").read_text())
