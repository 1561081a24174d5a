"""Hugging Face transformers: config.json of model_type mamba2, safetensors, sharded with an index.

(transformers 5.24: models/mamba2). Its class defaults are those of one 7B model and never fill a gap
here. norm_before_gate, rms_norm and time_step_{rank,min,max,floor} do not change what its model
computes and are not read. Mamba-1 is in huggingface_mamba1.py.
"""

from typing import Any

import torch

from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error
from mamba_cli.formats.format import (
    EMBEDDING,
    FIRST_MIXER,
    HEAD,
    Fields,
    Format,
    Shapes,
    count_layers,
    dimension,
    spell_dt_limit,
)
from mamba_cli.formats.huggingface_mamba1 import MAMBA1_TYPES, read_mamba1, write_mamba1
from mamba_cli.storage import dtype_name

STORED_EMBEDDING = "backbone.embeddings.weight"

# An extra key beside the format's own: vocab_size there counts the padded rows. Other tools ignore it.
REAL_VOCAB_SIZE = "unpadded_vocab_size"


class HuggingFace(Format):
    name = "hf"
    title = "Hugging Face transformers"

    def recognise(self, config: dict[str, Any]) -> str | None:
        model_type = config.get("model_type")
        return f"config.json has model_type {model_type}" if model_type in ("mamba2", *MAMBA1_TYPES) else None

    def canonical_name(self, stored: str) -> str:
        return EMBEDDING if stored == STORED_EMBEDDING else stored

    def stored_name(self, name: str) -> str:
        return STORED_EMBEDDING if name == EMBEDDING else name

    def read_config(self, config: dict[str, Any], shapes: Shapes) -> ModelConfig:
        given = {key: value for key, value in config.items() if value is not None}
        if given.get("model_type") in MAMBA1_TYPES:
            return read_mamba1(given, shapes, read_common(given, shapes))
        fields = Fields(_from_shapes(shapes) | given)
        norm_eps = fields.number("layer_norm_epsilon")
        values = read_common(given, shapes) | read_mixer(given, shapes)
        return ModelConfig(
            **values,
            norm_eps=norm_eps,
            gated_norm_eps=norm_eps,
            rmsnorm=True,
            norm_before_gate=False,
            D_has_hdim=False,
            dt_limit=fields.dt_limit("time_step_limit"),
        )

    def write_config(self, config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
        if config.layer == "Mamba1":
            return write_mamba1(config) | write_common(config, dtype)
        return {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            **write_common(config, dtype),
            **write_mixer(config),
            "layer_norm_epsilon": config.norm_eps,
            **spell_dt_limit(config, "time_step_limit"),
        }

    def cannot_hold(self, config: ModelConfig) -> list[str]:
        reasons = common_limits(config)
        if config.layer == "Mamba2":
            checks = {
                f"d_ssm {config.d_ssm} below d_inner {config.d_inner}": config.d_ssm != config.d_inner,
                "a D of each channel (D_has_hdim)": config.D_has_hdim,
                "a mixer without its gated norm (rmsnorm false)": not config.rmsnorm,
                "a norm before the gate (norm_before_gate)": config.norm_before_gate,
                f"norms of epsilon {config.norm_eps} and {config.gated_norm_eps}": (
                    config.norm_eps != config.gated_norm_eps
                ),
            }
            reasons += [reason for reason, applies in checks.items() if applies]
        if config.d_inner % config.d_model:
            reasons.append(f"d_inner {config.d_inner} that is not a multiple of hidden_size {config.d_model}")
        return reasons


def common_limits(config: ModelConfig) -> list[str]:
    """Return what no model of this library's Mamba classes has, and this one has."""
    checks = {
        f"attention layers {', '.join(map(str, config.attn_layer_idx))}": bool(config.attn_layer_idx),
        f"an MLP in each layer (d_intermediate {config.mlp_dim})": config.mlp_dim > 0,
        "LayerNorm (rms_norm false)": not config.rms_norm,
    }
    return [reason for reason, applies in checks.items() if applies]


def read_common(given: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Return the fields that all model types have; absent sizes are those of the tensors."""
    fields = Fields(_from_shapes(shapes) | given)
    if fields.text("hidden_act") not in ("silu", "swish"):
        raise Mamba2Error(f"config.json hidden_act: expected silu, got {given['hidden_act']}")
    rows = fields.integer("vocab_size")
    return {
        "d_model": fields.integer("hidden_size"),
        "n_layer": fields.integer("num_hidden_layers"),
        "vocab_size": fields.integer(REAL_VOCAB_SIZE) if REAL_VOCAB_SIZE in fields else rows,
        "vocab_rows": rows,
        "d_conv": fields.integer("conv_kernel"),
        "bias": fields.flag("use_bias"),
        "conv_bias": fields.flag("use_conv_bias"),
        "rms_norm": True,
        "residual_in_fp32": fields.flag("residual_in_fp32"),
        "tie_embeddings": fields.flag("tie_word_embeddings"),
        "bos_token_id": fields.token_id("bos_token_id"),
        "eos_token_id": fields.token_id("eos_token_id"),
        "pad_token_id": fields.token_id("pad_token_id"),
    }


def write_common(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    padded = config.vocab_size != config.vocab_rows
    return {
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "vocab_size": config.vocab_rows,
        **({REAL_VOCAB_SIZE: config.vocab_size} if padded else {}),
        "state_size": config.d_state,
        "conv_kernel": config.d_conv,
        "use_bias": config.bias,
        "use_conv_bias": config.conv_bias,
        "hidden_act": "silu",
        "residual_in_fp32": config.residual_in_fp32,
        "tie_word_embeddings": config.tie_embeddings,
        # Written even where there are none: the library's defaults are ids of other vocabularies.
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "dtype": dtype_name(dtype),
    }


def read_mixer(given: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Return the sizes of a Mamba-2 mixer. The two ways to say its width have to agree."""
    fields = Fields(_from_shapes(shapes) | given)
    d_inner = fields.integer("num_heads") * fields.integer("head_dim")
    expanded = fields.product("expand", fields.integer("hidden_size")) if "expand" in given else d_inner
    if d_inner != expanded:
        raise Mamba2Error(
            f"config.json num_heads * head_dim: expected expand * hidden_size = {expanded}, got {d_inner}"
        )
    return {
        "layer": "Mamba2",
        "d_state": _other_factor("state_size", "n_groups", given, shapes, d_inner),
        "d_inner": d_inner,
        "d_ssm": d_inner,
        "headdim": fields.integer("head_dim"),
        "ngroups": _other_factor("n_groups", "state_size", given, shapes, d_inner),
        # Not a part of the function, so any will do.
        "chunk_size": fields.integer("chunk_size") if "chunk_size" in given else 256,
    }


def _other_factor(key: str, other: str, given: dict[str, Any], shapes: Shapes, d_inner: int) -> int:
    """Return state_size or n_groups; where it is absent, by the convolution's d_inner + 2 * their product."""
    fields = Fields(given)
    conv_dim = dimension(shapes, FIRST_MIXER + "conv1d.weight", 0)
    if key not in fields and other in fields and conv_dim:
        return (conv_dim - d_inner) // (2 * fields.integer(other) or 1)
    return fields.integer(key)


def write_mixer(config: ModelConfig) -> dict[str, Any]:
    whole = config.d_inner % config.d_model == 0
    return {
        "expand": config.d_inner // config.d_model if whole else config.d_inner / config.d_model,
        "num_heads": config.nheads,
        "head_dim": config.headdim,
        "n_groups": config.ngroups,
        "chunk_size": config.chunk_size,
    }


def _from_shapes(shapes: Shapes) -> dict[str, Any]:
    """Return the keys that a checkpoint's tensors determine."""
    heads = dimension(shapes, FIRST_MIXER + "A_log", 0)
    d_inner = dimension(shapes, FIRST_MIXER + "out_proj.weight", 1)
    return {
        "hidden_size": dimension(shapes, EMBEDDING, 1),
        "vocab_size": dimension(shapes, EMBEDDING, 0),
        "num_hidden_layers": count_layers(shapes),
        "conv_kernel": dimension(shapes, FIRST_MIXER + "conv1d.weight", 2),
        "use_bias": FIRST_MIXER + "in_proj.bias" in shapes,
        "use_conv_bias": FIRST_MIXER + "conv1d.bias" in shapes,
        "tie_word_embeddings": HEAD not in shapes,
        "num_heads": heads,
        "head_dim": d_inner // heads if heads and d_inner and d_inner % heads == 0 else None,
    }
