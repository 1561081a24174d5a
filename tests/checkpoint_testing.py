"""Small checkpoints on disk, made by the libraries that define the formats and not by our own writers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mamba_cli.config import ModelConfig
from mamba_cli.formats import get_format
from mamba_cli.weights import random_tensors


def state_spaces_config(config: ModelConfig) -> dict[str, Any]:
    return get_format("state-spaces").write_config(config, torch.float32)


def state_dict(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random tensors as mamba_ssm's model has them: with the head, tied or not."""
    tensors = random_tensors(config, seed)
    tensors.setdefault("lm_head.weight", tensors["backbone.embedding.weight"])
    return tensors


def save_state_spaces(
    folder: Path, config: ModelConfig, tensors: dict[str, torch.Tensor] | None = None, bin: bool = True
) -> Path:
    """Write a state-spaces checkpoint as mamba_ssm does, or with bin false as a safetensors copy of it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(state_spaces_config(config)))
    tensors = state_dict(config) if tensors is None else tensors
    if bin:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(copies, folder / "model.safetensors", {"format": "pt"})
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of ... takes the key away."""
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))


def strict_json(path: Path) -> dict[str, Any]:
    """Parse a file as a parser without Infinity and NaN does."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(path.read_text(), parse_constant=refuse)
