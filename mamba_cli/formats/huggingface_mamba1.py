"""Hugging Face transformers' Mamba-1 models: model_type mamba, and falcon_mamba with norms on B, C, dt.

(transformers 5.24: models/mamba, models/falcon_mamba)
"""

import math
from typing import Any

from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error
from mamba_cli.formats.format import FIRST_MIXER, MAMBA1, Fields, Shapes, dimension

MAMBA1_TYPES = ("mamba", "falcon_mamba")


def read_mamba1(given: dict[str, Any], shapes: Shapes, common: dict[str, Any]) -> ModelConfig:
    """Return the configuration; `common` has the fields that all model types have."""
    derived = {
        "state_size": dimension(shapes, FIRST_MIXER + "A_log", 1),
        "time_step_rank": dimension(shapes, FIRST_MIXER + "dt_proj.weight", 1),
        "intermediate_size": dimension(shapes, FIRST_MIXER + "out_proj.weight", 1),
    }
    fields = Fields(derived | given)
    d_model = common["d_model"]
    # Where both are there, the library takes intermediate_size.
    if "expand" in given and "intermediate_size" not in given:
        d_inner = int(fields.number("expand") * d_model)
    else:
        d_inner = fields.integer("intermediate_size")
    falcon = fields.text("model_type") == "falcon_mamba"
    if not falcon and given.get("use_bcdt_rms"):
        raise Mamba2Error("config.json use_bcdt_rms: expected model_type falcon_mamba, got mamba")
    automatic = given.get("time_step_rank") == "auto"
    return ModelConfig(
        **common | MAMBA1,
        d_state=fields.integer("state_size"),
        d_inner=d_inner,
        d_ssm=d_inner,
        dt_rank=math.ceil(d_model / 16) if automatic else fields.integer("time_step_rank"),
        norm_eps=fields.number("layer_norm_epsilon"),
        bcdt_norm_eps=fields.number("mixer_rms_eps") if falcon else None,
    )


def write_mamba1(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that only these models have, and their names."""
    falcon = config.bcdt_norm_eps is not None
    return {
        "architectures": ["FalconMambaForCausalLM" if falcon else "MambaForCausalLM"],
        "model_type": "falcon_mamba" if falcon else "mamba",
        "expand": config.d_inner // config.d_model,
        "intermediate_size": config.d_inner,
        "time_step_rank": config.dt_rank,
        "layer_norm_epsilon": config.norm_eps,
        **({"mixer_rms_eps": config.bcdt_norm_eps} if falcon else {}),
    }
