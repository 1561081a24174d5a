"""Checkpoint formats: one file each, and one line here."""

from pathlib import Path

from mamba_cli.errors import Mamba2Error
from mamba_cli.files import inside, read_json
from mamba_cli.formats.fla import Fla
from mamba_cli.formats.format import Format
from mamba_cli.formats.huggingface import HuggingFace
from mamba_cli.formats.state_spaces import StateSpaces

# The first that recognises a checkpoint has it: fla's configurations call themselves Hugging Face's.
FORMATS: tuple[Format, ...] = (Fla(), HuggingFace(), StateSpaces())


def detect(path: Path) -> tuple[Format, str]:
    """Return the format of the checkpoint at `path`, and why it is that one."""
    for format in FORMATS:
        reason = format.detect(path)
        if reason:
            return format, reason
    if not path.is_dir():
        raise Mamba2Error(f"{path}: expected the folder of a checkpoint, got a file of no known format")
    if not (path / "config.json").exists():
        raise Mamba2Error(f"{path / 'config.json'}: expected a checkpoint's configuration, got no such file")
    kind = read_json(inside(path, "config.json")).get("model_type")
    raise Mamba2Error(
        f"{path / 'config.json'}: expected model_type mamba2, mamba or falcon_mamba, or the keys d_model and "
        f"n_layer, got {f'model_type {kind}' if kind else 'neither'}"
    )


def get_format(name: str) -> Format:
    """Return the format that --to calls `name`."""
    for format in FORMATS:
        if format.name == name:
            return format
    names = ", ".join(format.name for format in FORMATS)
    raise Mamba2Error(f"format: expected one of {names}, got {name}")
