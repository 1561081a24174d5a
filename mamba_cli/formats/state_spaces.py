"""state-spaces: config.json and pytorch_model.bin as mamba_ssm saves and loads them.

mamba_ssm's defaults are part of this format: its own loader fills a key that is not there with them.
(mamba_ssm 2.3.2: models/config_mamba.py, modules/{mamba2,mamba_simple,mha,mlp}.py)
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from mamba_cli.config import AttentionConfig, ModelConfig
from mamba_cli.errors import Mamba2Error
from mamba_cli.formats.format import MAMBA1, Fields, Format, Shapes, spell_dt_limit

DEFAULTS: dict[str, Any] = {
    "d_model": 2560,
    "d_intermediate": 0,
    "n_layer": 64,
    "vocab_size": 50277,
    "ssm_cfg": {},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
    "tie_embeddings": True,
}
MAMBA2_DEFAULTS: dict[str, Any] = {
    "d_state": 128,
    "d_conv": 4,
    "expand": 2,
    "headdim": 64,
    "d_ssm": None,
    "ngroups": 1,
    "D_has_hdim": False,
    "rmsnorm": True,
    "norm_before_gate": False,
    "dt_limit": None,
    "bias": False,
    "conv_bias": True,
    "chunk_size": 256,
}
MAMBA1_DEFAULTS: dict[str, Any] = {
    "d_state": 16,
    "d_conv": 4,
    "expand": 2,
    "dt_rank": "auto",
    "bias": False,
    "conv_bias": True,
}
ATTENTION_DEFAULTS: dict[str, Any] = {
    "num_heads_kv": None,
    "head_dim": None,
    "mlp_dim": 0,
    "qkv_proj_bias": True,
    "out_proj_bias": True,
    "softmax_scale": None,
    "causal": False,
    "d_conv": 0,
    "rotary_emb_dim": 0,
    "rotary_emb_base": 10000.0,
    "rotary_emb_interleaved": False,
}
# Read by mamba_ssm when it makes or trains a model, and of no meaning for a trained one.
WITHOUT_EFFECT = frozenset(
    "A_init_range conv_init dt_init dt_init_floor dt_max dt_min dt_scale process_group sequence_parallel "
    "use_fast_path use_mem_eff_path".split()
)
# Keys that other tools add beside the configuration.
METADATA = frozenset(
    "_name_or_path architectures bos_token_id dtype eos_token_id pad_token_id state_quantization torch_dtype "
    "transformers_version".split()
)
NORM_EPS = 1e-5  # a constant in mamba_ssm
MLP_MULTIPLE = 128
ATTENTION_MLP_MULTIPLE = 256


class StateSpaces(Format):
    name = "state-spaces"
    title = "state-spaces (mamba_ssm)"
    writes_tied_head = True
    refuses_other_keys = True  # MambaConfig(**config): models/mixer_seq_simple.py

    def recognise(self, config: dict[str, Any]) -> str | None:
        if config.get("model_type") or not config.keys() & {"d_model", "n_layer", "ssm_cfg"}:
            return None
        found = [key for key in ("d_model", "n_layer", "ssm_cfg") if key in config]
        return f"config.json has {', '.join(found)} and no model_type"

    def read_config(self, config: dict[str, Any], shapes: Shapes) -> ModelConfig:
        fields = Fields(_with_defaults(config, DEFAULTS, METADATA, "config.json"))
        d_model = fields.integer("d_model")
        ssm_cfg = dict(fields.section("ssm_cfg"))
        layer = ssm_cfg.pop("layer", "Mamba1")
        attn_layer_idx = _layer_indices(config.get("attn_layer_idx") or [])
        values = {
            "d_model": d_model,
            "n_layer": fields.integer("n_layer"),
            "vocab_size": fields.integer("vocab_size"),
            "vocab_rows": _round_up(fields.integer("vocab_size"), fields.integer("pad_vocab_size_multiple")),
            "rms_norm": fields.flag("rms_norm"),
            "norm_eps": NORM_EPS,
            "gated_norm_eps": NORM_EPS,
            "residual_in_fp32": fields.flag("residual_in_fp32"),
            "tie_embeddings": fields.flag("tie_embeddings"),
            "mlp_dim": _round_up(fields.integer("d_intermediate"), MLP_MULTIPLE),
            "attn_layer_idx": attn_layer_idx,
            "attention": _read_attention(fields.section("attn_cfg"), d_model) if attn_layer_idx else None,
            "bos_token_id": fields.token_id("bos_token_id"),
            "eos_token_id": fields.token_id("eos_token_id"),
            "pad_token_id": fields.token_id("pad_token_id"),
        }
        if layer == "Mamba2":
            return ModelConfig(**values | _read_mamba2(ssm_cfg, d_model))
        if layer == "Mamba1":
            return ModelConfig(**values | _read_mamba1(ssm_cfg, d_model))
        raise Mamba2Error(f"config.json ssm_cfg.layer: expected Mamba1 or Mamba2, got {layer}")

    def write_config(self, config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "d_model": config.d_model,
            "d_intermediate": config.mlp_dim,
            "n_layer": config.n_layer,
            "vocab_size": config.vocab_size,
            "ssm_cfg": _write_mamba2(config) if config.layer == "Mamba2" else _write_mamba1(config),
            "attn_layer_idx": list(config.attn_layer_idx),
            "attn_cfg": _write_attention(config.attention) if config.attention else {},
            "rms_norm": config.rms_norm,
            "residual_in_fp32": config.residual_in_fp32,
            "fused_add_norm": True,
            "pad_vocab_size_multiple": _padding(config.vocab_size, config.vocab_rows),
            "tie_embeddings": config.tie_embeddings,
        }

    def cannot_hold(self, config: ModelConfig) -> list[str]:
        reasons = []
        if config.norm_eps != NORM_EPS or (config.rmsnorm and config.gated_norm_eps != NORM_EPS):
            reasons.append(f"a norm epsilon of {config.norm_eps} (mamba_ssm has {NORM_EPS} built in)")
        if config.bcdt_norm_eps is not None:
            reasons.append("norms on B, C and dt (FalconMamba)")
        if config.d_inner % config.d_model:
            reasons.append(f"d_inner {config.d_inner} that is not a multiple of d_model {config.d_model}")
        if config.mlp_dim % MLP_MULTIPLE:
            reasons.append(f"an MLP of width {config.mlp_dim}, not a multiple of {MLP_MULTIPLE}")
        return reasons


def _with_defaults(
    values: Mapping[str, Any], defaults: dict[str, Any], ignored: frozenset[str], where: str
) -> dict[str, Any]:
    """Return the values with the defaults of absent keys. mamba_ssm takes no key that it does not know."""
    unknown = sorted(values.keys() - defaults.keys() - ignored)
    if unknown:
        raise Mamba2Error(f"{where}: expected keys of mamba_ssm, got {', '.join(unknown)}")
    return defaults | {key: value for key, value in values.items() if value is not None}


def _read_mamba2(ssm_cfg: dict[str, Any], d_model: int) -> dict[str, Any]:
    where = "config.json ssm_cfg"
    fields = Fields(_with_defaults(ssm_cfg, MAMBA2_DEFAULTS, WITHOUT_EFFECT, where), where)
    d_inner = fields.product("expand", d_model)
    return {
        "layer": "Mamba2",
        "d_state": fields.integer("d_state"),
        "d_conv": fields.integer("d_conv"),
        "d_inner": d_inner,
        "d_ssm": fields.integer("d_ssm") if "d_ssm" in fields else d_inner,
        "headdim": fields.integer("headdim"),
        "ngroups": fields.integer("ngroups"),
        "chunk_size": fields.integer("chunk_size"),
        "D_has_hdim": fields.flag("D_has_hdim"),
        "rmsnorm": fields.flag("rmsnorm"),
        "norm_before_gate": fields.flag("norm_before_gate"),
        "dt_limit": fields.dt_limit("dt_limit"),
        "bias": fields.flag("bias"),
        "conv_bias": fields.flag("conv_bias"),
    }


def _write_mamba2(config: ModelConfig) -> dict[str, Any]:
    return {
        "layer": "Mamba2",
        "d_state": config.d_state,
        "d_conv": config.d_conv,
        "expand": config.d_inner // config.d_model,
        "headdim": config.headdim,
        "d_ssm": config.d_ssm,
        "ngroups": config.ngroups,
        "D_has_hdim": config.D_has_hdim,
        "rmsnorm": config.rmsnorm,
        "norm_before_gate": config.norm_before_gate,
        **spell_dt_limit(config, "dt_limit"),
        "bias": config.bias,
        "conv_bias": config.conv_bias,
        "chunk_size": config.chunk_size,
    }


def _read_mamba1(ssm_cfg: dict[str, Any], d_model: int) -> dict[str, Any]:
    where = "config.json ssm_cfg"
    fields = Fields(_with_defaults(ssm_cfg, MAMBA1_DEFAULTS, WITHOUT_EFFECT, where), where)
    d_inner = int(fields.number("expand") * d_model)
    automatic = ssm_cfg.get("dt_rank", "auto") == "auto"
    return MAMBA1 | {
        "d_state": fields.integer("d_state"),
        "d_conv": fields.integer("d_conv"),
        "d_inner": d_inner,
        "d_ssm": d_inner,
        "dt_rank": math.ceil(d_model / 16) if automatic else fields.integer("dt_rank"),
        "bias": fields.flag("bias"),
        "conv_bias": fields.flag("conv_bias"),
    }


def _write_mamba1(config: ModelConfig) -> dict[str, Any]:
    return {
        "layer": "Mamba1",
        "d_state": config.d_state,
        "d_conv": config.d_conv,
        "expand": config.d_inner // config.d_model,
        "dt_rank": config.dt_rank,
        "bias": config.bias,
        "conv_bias": config.conv_bias,
    }


def _read_attention(attn_cfg: dict[str, Any], d_model: int) -> AttentionConfig:
    where = "config.json attn_cfg"
    known = {"num_heads": None} | ATTENTION_DEFAULTS
    fields = Fields(_with_defaults(attn_cfg, known, WITHOUT_EFFECT, where), where)
    num_heads = fields.integer("num_heads")
    if not fields.flag("causal"):
        raise Mamba2Error(f"{where} causal: expected true for a language model, got false, or no such key")
    if "head_dim" not in fields and (num_heads < 1 or d_model % num_heads):
        raise Mamba2Error(f"{where} num_heads: expected a divisor of d_model {d_model}, got {num_heads}")
    head_dim = fields.integer("head_dim") if "head_dim" in fields else d_model // num_heads
    scale = fields.number("softmax_scale") if "softmax_scale" in fields else max(head_dim, 1) ** -0.5
    return AttentionConfig(
        num_heads=num_heads,
        num_heads_kv=fields.integer("num_heads_kv") if "num_heads_kv" in fields else num_heads,
        head_dim=head_dim,
        d_conv=fields.integer("d_conv"),
        mlp_dim=_round_up(fields.integer("mlp_dim"), ATTENTION_MLP_MULTIPLE),
        qkv_proj_bias=fields.flag("qkv_proj_bias"),
        out_proj_bias=fields.flag("out_proj_bias"),
        softmax_scale=scale,
        rotary_emb_dim=fields.integer("rotary_emb_dim"),
        rotary_emb_base=fields.number("rotary_emb_base"),
        rotary_emb_interleaved=fields.flag("rotary_emb_interleaved"),
    )


def _write_attention(attention: AttentionConfig) -> dict[str, Any]:
    own_scale = attention.softmax_scale != attention.head_dim**-0.5
    return {
        "causal": True,
        "num_heads": attention.num_heads,
        "num_heads_kv": attention.num_heads_kv,
        "head_dim": attention.head_dim,
        "d_conv": attention.d_conv,
        "mlp_dim": attention.mlp_dim,
        "qkv_proj_bias": attention.qkv_proj_bias,
        "out_proj_bias": attention.out_proj_bias,
        **({"softmax_scale": attention.softmax_scale} if own_scale else {}),
        "rotary_emb_dim": attention.rotary_emb_dim,
        "rotary_emb_base": attention.rotary_emb_base,
        "rotary_emb_interleaved": attention.rotary_emb_interleaved,
    }


def _layer_indices(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(index) is int for index in value):
        raise Mamba2Error(f"config.json attn_layer_idx: expected a list of layers, got {value!r}")
    return tuple(value)


def _round_up(value: int, multiple: int) -> int:
    if value < 0 or multiple < 1:
        raise Mamba2Error(f"config.json: expected sizes of 0 or more, got {value} in multiples of {multiple}")
    return -(-value // multiple) * multiple


def _padding(vocab_size: int, rows: int) -> int:
    """Return a pad_vocab_size_multiple that gives `rows`. The published ones are 8 and 16."""
    for multiple in (8, 16, 32, 64, 128, 256, 512, 1024, 1):
        if _round_up(vocab_size, multiple) == rows:
            return multiple
    return rows
