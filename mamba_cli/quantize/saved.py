"""A state format kept with a checkpoint: a section of its configuration, and a file of scales.

The folder stays the plain model for every other tool. The section is a key of config.json, or, where the
format's own library refuses a key that it does not know, a file beside it.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from mamba_cli.checkpoint import Checkpoint, open_checkpoint
from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error
from mamba_cli.files import (
    STATE_SCALES_FILE,
    STATE_SECTION,
    STATE_SECTION_FILE,
    file_size,
    inside,
    read_json,
    write_json,
)
from mamba_cli.formats import get_format
from mamba_cli.publish import check_destination, new_folder
from mamba_cli.quantize.section import describe, read_section, state_heads, write_section
from mamba_cli.state_format import StateFormat
from mamba_cli.storage import open_tensors, weight_files, weights_entry
from mamba_cli.tokenizer import TOKENIZER_FILES

# What is taken of a folder beside the weights that are read: the same in the other kind of file, which
# another tool may prefer; configuration, tokenizer, templates and code; and words about the model.
WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin")
OTHER_FILES = (
    "*.json", "*.jinja", "*.model", "*.tiktoken", "*.py", "*.md", "*.txt", *TOKENIZER_FILES,
    "additional_chat_templates/*.jinja", "README*", "LICEN[CS]E*", "NOTICE*", "COPYING*",
)  # fmt: skip
LARGEST_RECIPE = 16 << 20
COPIED_AT_ONCE = 16 << 20  # bytes


@dataclass(frozen=True)
class Scales:
    """What belongs to a format beside the words: fp32 on the CPU, a layer each; None for attention.

    half_lives: tokens, (nheads,), for Mamba-1 (d_inner, d_state), as measured on a text; columns: static
    scales (heads, d_state), all None where the format has none; conv: the largest magnitude that each
    channel's input to the convolution had, (conv_dim,).
    """

    half_lives: tuple[torch.Tensor | None, ...]
    columns: tuple[torch.Tensor | None, ...]
    conv: tuple[torch.Tensor | None, ...]

    @property
    def outer(self) -> bool:
        """Whether there are column scales."""
        return any(column is not None for column in self.columns)

    @property
    def unknown(self) -> bool:
        """Whether there are none at all, as beside a section that was written by hand."""
        return all(lives is None for lives in self.half_lives)

    def kept(self, outer: bool) -> "Scales":
        """Return the same, without the column scales where the format has none."""
        return self if outer else replace(self, columns=(None,) * len(self.columns))


@dataclass(frozen=True)
class Written:
    """A folder that was written: its files, and how many bytes of them are links to the source's."""

    folder: Path
    files: tuple[str, ...]
    linked: int
    copied: int


def read_saved(checkpoint: Checkpoint) -> tuple[StateFormat, Scales] | None:
    """Return the state format that lies with a checkpoint, and its scales; None where there is none.

    Raises Mamba2Error where they do not fit the model, or each other.
    """
    found = find_section(checkpoint.folder)
    if found is None:
        return None
    section, where = found
    format, outer = read_section(section, checkpoint.config, where)
    if section.get("scales") is None:
        if outer or format.conv in ("fp8", "int8"):
            raise Mamba2Error(f"{where} scales: expected {STATE_SCALES_FILE} for this format, got none")
        nothing = (None,) * checkpoint.config.n_layer
        return format, Scales(nothing, nothing, nothing)
    return format, _read_scales(checkpoint.folder, checkpoint.config, outer)


def describe_saved(format: StateFormat, scales: Scales) -> str:
    """Say in one line how a checkpoint wants its state kept."""
    return "; ".join(
        [format.name, *(f"{key} {value}" for key, value in describe(format, scales.outer).items())]
    )


def find_section(folder: Path) -> tuple[Any, str] | None:
    """Return the section of the checkpoint in `folder`, unchecked, and where it stands; None without one."""
    if not folder.is_dir():
        return None
    if os.path.lexists(folder / STATE_SECTION_FILE):
        return read_json(inside(folder, STATE_SECTION_FILE)), str(folder / STATE_SECTION_FILE)
    config = inside(folder, "config.json")
    section = read_json(config).get(STATE_SECTION) if config.is_file() else None
    return None if section is None else (section, f"{folder / 'config.json'} {STATE_SECTION}")


def read_recipe(path: Path, config: ModelConfig) -> tuple[StateFormat, bool]:
    """Return the state format in a file of the section's form, and whether it wants column scales."""
    if file_size(path, "a recipe in JSON") > LARGEST_RECIPE:
        raise Mamba2Error(f"{path}: expected a recipe of at most {LARGEST_RECIPE >> 20} MiB, got more")
    document = read_json(path)
    if "layers" not in document:  # a config.json that holds a section is a recipe as well
        if STATE_SECTION not in document:
            raise Mamba2Error(f"{path}: expected a recipe's layers, or the key {STATE_SECTION}, got neither")
        return read_section(document[STATE_SECTION], config, f"{path} {STATE_SECTION}")
    return read_section(document, config, str(path))


def check_can_carry(model: str, checkpoint_path: Path) -> None:
    """Refuse a checkpoint that is one file: there is no configuration to put a section into."""
    if checkpoint_path.is_file():
        raise Mamba2Error(
            f"{model}: expected a folder, whose configuration can carry {STATE_SECTION}, got one file",
            f"mamba2 convert {model} FOLDER --to hf, then mamba2 quantize-state FOLDER",
        )


def write_quantized(
    checkpoint: Checkpoint,
    destination: Path,
    format: StateFormat,
    scales: Scales,
    overwrite: bool = False,
    on_progress: Callable[[float], object] = lambda share: None,
) -> Written:
    """Write the folder `destination`: the checkpoint's own files, the section and the scales.

    Its own are the weights and what OTHER_FILES fits: no subfolders of other things, nothing that training
    left there. Weights are hard links to the source's files where the file system allows, else copies; every
    other file is a copy, and nothing refers to the source by its name. The folder appears when it is complete
    and was read back as the same model. on_progress: is called with shares of the copying, 1 in all.
    """
    check_destination(destination, checkpoint.folder, overwrite)
    linked = 0
    copies: list[tuple[Path, Path]] = []
    with new_folder(destination) as folder:
        for name, is_weights in _own_files(checkpoint.folder):
            # A hard link to a link is no file.
            source, target = inside(checkpoint.folder, str(name)).resolve(), folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if is_weights and _link(source, target):
                linked += target.stat().st_size
            else:
                copies.append((source, target))
        copied = sum(source.stat().st_size for source, _ in copies)
        for source, target in copies:
            _copy(source, target, lambda nbytes: on_progress(nbytes / (2 * copied)))
        _put_format(checkpoint.format, folder, format, scales)
        _check_written(folder, checkpoint, format)
        files = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
    return Written(destination, files, linked, copied)


def carry_section(source: Checkpoint, folder: Path) -> None:
    """Give the model in `folder`, the same in whatever format, the state format that `source` has."""
    saved = read_saved(source)
    if saved is not None:
        _put_format(open_checkpoint(folder).format, folder, *saved)


def _put_format(format_name: str, folder: Path, format: StateFormat, scales: Scales) -> None:
    """Add a state format to a folder that has its config.json."""
    section = write_section(format, scales.outer)
    if scales.unknown:
        section["scales"] = None
    else:
        _write_scales(folder / STATE_SCALES_FILE, scales)
    if get_format(format_name).refuses_other_keys:
        write_json(folder / STATE_SECTION_FILE, section)
    else:
        # Infinity and NaN, which are no JSON, stay as they are: this configuration's readers know them.
        document = read_json(folder / "config.json") | {STATE_SECTION: section}
        text = json.dumps(document, indent=2, ensure_ascii=False)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _own_files(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the names of a checkpoint's files, and whether they are weights, which are large and stay."""
    read = {path.relative_to(folder) for path in (weights_entry(folder), *weight_files(folder))}
    weights = {path for path in read if path.suffix != ".json"} | _matching(folder, WEIGHT_FILES)
    written_anew = {Path(STATE_SECTION_FILE), Path(STATE_SCALES_FILE)}
    for name in sorted((read | weights | _matching(folder, OTHER_FILES)) - written_anew):
        yield name, name in weights


def _matching(folder: Path, patterns: Iterable[str]) -> set[Path]:
    """Return the names of the files, none of them hidden, that the patterns fit."""
    found = {path.relative_to(folder) for pattern in patterns for path in folder.glob(pattern)}
    return {name for name in found if not name.name.startswith(".") and (folder / name).is_file()}


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another file system, one without links, or not the user's own file
        return False
    return True


def _copy(source: Path, target: Path, on_bytes: Callable[[int], object]) -> None:
    """Copy a file and compare it with the copy; on_bytes is called with the bytes of each piece of both."""
    with source.open("rb") as original, target.open("wb") as copy:
        while piece := original.read(COPIED_AT_ONCE):
            on_bytes(copy.write(piece))
    with source.open("rb") as original, target.open("rb") as copy:
        while True:
            piece = original.read(COPIED_AT_ONCE)
            if copy.read(COPIED_AT_ONCE) != piece:
                raise Mamba2Error(
                    f"{target.name}: expected the source's bytes, got others: is the disk sound?"
                )
            if not piece:
                return
            on_bytes(len(piece))


def _check_written(folder: Path, source: Checkpoint, format: StateFormat) -> None:
    """Open what was written as any checkpoint: the same model, and the format that was asked for."""
    written = open_checkpoint(folder)
    saved = read_saved(written)
    if written.config != source.config or written.tensors.keys() != source.tensors.keys():
        raise Mamba2Error("written checkpoint: expected the source's configuration and tensors, got others")
    if saved is None or saved[0] != format:
        raise Mamba2Error(f"written {STATE_SECTION}: expected the format that was chosen, got another")


def _write_scales(path: Path, scales: Scales) -> None:
    tensors = {
        f"layers.{index}.{kind}": tensor.float().contiguous()
        for kind in ("half_lives", "columns", "conv")
        for index, tensor in enumerate(getattr(scales, kind))
        if tensor is not None
    }
    path.write_bytes(safetensors.torch.save(tensors, {"format": "pt"}))


def _read_scales(folder: Path, config: ModelConfig, outer: bool) -> Scales:
    """Return the scales beside a section; what is missing, not known or of another shape is an error."""
    path = inside(folder, STATE_SCALES_FILE)
    if not path.is_file():
        raise Mamba2Error(
            f"{path}: expected the scales that {STATE_SECTION} needs, got no such file",
            "--state-dtype fp32 does without; mamba2 quantize-state writes them",
        )
    stored = open_tensors(path)
    heads = state_heads(config)
    shapes = {
        "half_lives": (config.nheads,) if config.layer == "Mamba2" else (config.d_inner, config.d_state),
        "columns": (heads, config.d_state),
        "conv": (config.conv_dim,),
    }
    found: dict[str, list[torch.Tensor | None]] = {kind: [None] * config.n_layer for kind in shapes}
    wanted = {
        f"layers.{index}.{kind}": (index, kind)
        for kind in shapes
        for index in range(config.n_layer)
        if index not in config.attn_layer_idx and (kind != "columns" or outer)
    }
    for name, (index, kind) in wanted.items():
        tensor = stored.pop(name, None)
        if tensor is None:
            raise Mamba2Error(f"{path}: expected {name} of shape {shapes[kind]}, got no such tensor")
        if tensor.shape != shapes[kind] or tensor.dtype != torch.float32:
            raise Mamba2Error(
                f"{path} {name}: expected float32 of shape {shapes[kind]}, got {tensor.dtype} {tensor.shape}"
            )
        values = tensor.load()
        least = 0.0 if kind == "conv" else torch.finfo(torch.float32).tiny
        if not (values >= least).all() or (kind != "half_lives" and not values.isfinite().all()):
            raise Mamba2Error(f"{path} {name}: expected positive finite numbers, got others")
        found[kind][index] = values
    if stored:
        raise Mamba2Error(f"{path}: expected only the scales of this format, got {next(iter(stored))}")
    return Scales(**{kind: tuple(values) for kind, values in found.items()})
