"""flash-linear-attention: model_type mamba2 like Hugging Face's, under keys of its own.

(fla: models/mamba2/configuration_mamba2.py) Its older versions wrote rms_norm and time_step_limit for
rmsnorm and dt_limit, and had no D_has_hdim and no norm_before_gate: the gate always came first.
"""

from typing import Any

import torch

from mamba_cli.config import ModelConfig
from mamba_cli.formats.format import FIRST_MIXER, Fields, Shapes, dimension, spell_dt_limit
from mamba_cli.formats.huggingface import (
    HuggingFace,
    common_limits,
    read_common,
    read_mixer,
    write_common,
    write_mixer,
)

OWN_KEYS = ("norm_eps", "rmsnorm", "dt_limit", "fuse_norm")
OLD_NAMES = {"rms_norm": "rmsnorm", "time_step_limit": "dt_limit"}


class Fla(HuggingFace):
    name = "fla"
    title = "flash-linear-attention"

    def recognise(self, config: dict[str, Any]) -> str | None:
        found = [key for key in OWN_KEYS if key in config]
        if config.get("model_type") != "mamba2" or not found:
            return None
        return f"config.json has model_type mamba2 and {', '.join(found)}"

    def read_config(self, config: dict[str, Any], shapes: Shapes) -> ModelConfig:
        given = {OLD_NAMES.get(key, key): value for key, value in config.items() if value is not None}
        mixer = read_mixer(given, shapes)
        derived = {
            "rmsnorm": FIRST_MIXER + "norm.weight" in shapes,
            "D_has_hdim": dimension(shapes, FIRST_MIXER + "D", 0) != mixer["d_ssm"] // mixer["headdim"],
            "norm_before_gate": False,
        }
        fields = Fields(derived | given)
        norm_eps = fields.number("norm_eps")
        return ModelConfig(
            **read_common(given, shapes),
            **mixer,
            norm_eps=norm_eps,
            gated_norm_eps=norm_eps,
            rmsnorm=fields.flag("rmsnorm"),
            norm_before_gate=fields.flag("norm_before_gate"),
            D_has_hdim=fields.flag("D_has_hdim"),
            dt_limit=fields.dt_limit("dt_limit"),
        )

    def write_config(self, config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            **write_common(config, dtype),
            **write_mixer(config),
            "norm_eps": config.norm_eps,
            "rmsnorm": config.rmsnorm,
            "norm_before_gate": config.norm_before_gate,
            "D_has_hdim": config.D_has_hdim,
            **spell_dt_limit(config, "dt_limit"),
        }

    def cannot_hold(self, config: ModelConfig) -> list[str]:
        if config.layer != "Mamba2":
            return ["Mamba-1 layers"]
        reasons = common_limits(config)
        if config.d_ssm != config.d_inner:
            reasons.append(f"d_ssm {config.d_ssm} below d_inner {config.d_inner}")
        if config.rmsnorm and config.norm_eps != config.gated_norm_eps:
            reasons.append(f"norms of epsilon {config.norm_eps} and {config.gated_norm_eps}")
        if int(config.d_inner / config.d_model * config.d_model) != config.d_inner:
            reasons.append(f"d_inner {config.d_inner} that is not a multiple of hidden_size {config.d_model}")
        return reasons
