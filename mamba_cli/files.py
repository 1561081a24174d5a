"""The files of a checkpoint: which ones belong to it, and its JSON."""

import json
from pathlib import Path
from typing import Any

from mamba_cli.errors import Mamba2Error

# What `quantize-state` adds to a checkpoint: a key of config.json, or a file of its own where the format's
# library refuses other keys, and a file of scales.
STATE_SECTION = "state_quantization"
STATE_SECTION_FILE = "state_quantization.json"
STATE_SCALES_FILE = "state_scales.safetensors"

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def inside(folder: Path, name: str) -> Path:
    """Return folder/name, refused where that leads out of the folder, by its name or by a link.

    Names come from an index and links from an archive, and both are untrusted. The hub's cache keeps
    a snapshot's files in the `blobs` folder of the same repository, so links into it belong.
    """
    path = folder / name
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    try:
        target = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a name with a null byte
        raise Mamba2Error(f"{folder}: expected names of files in it, got {name!r}: {error}") from error
    if not any(target.is_relative_to(place) for place in allowed):
        raise Mamba2Error(f"{folder}: expected files inside the folder, got {name!r} leading to {target}")
    return path


def file_size(path: Path, what: str) -> int:
    """Return the bytes of a file that should hold `what`, refused where it only stands for one."""
    if not path.is_file():
        found = "a folder" if path.is_dir() else "a link to nothing" if path.is_symlink() else "no such file"
        raise Mamba2Error(f"{path}: expected {what}, got {found}")
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
    if not start:
        raise Mamba2Error(f"{path}: expected {what}, got an empty file")
    if start == LFS_POINTER:
        raise Mamba2Error(
            f"{path}: expected {what}, got a Git-LFS pointer to it",
            f"git -C {path.parent} lfs pull",
        )
    return path.stat().st_size


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Bare Infinity and NaN, which are no JSON, are read too."""
    file_size(path, "JSON")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Mamba2Error(f"{path}: expected JSON, got: {error}") from error
    if not isinstance(document, dict):
        raise Mamba2Error(f"{path}: expected a JSON object, got {type(document).__name__}")
    return document


def is_strict_json(path: Path) -> bool:
    """Whether every JSON parser reads the file: no bare Infinity or NaN."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except ValueError:
        return False
    return True


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write strict JSON: an infinity or NaN anywhere in `document` is a ValueError."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
