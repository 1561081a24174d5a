"""From one checkpoint format to another, and back to the last bit.

Tensors go one by one, so memory stays near the largest of them. The result is written under another
name, read back as any checkpoint is, compared with the source, and only then takes its own name.
"""

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mamba_cli.checkpoint import Checkpoint, open_checkpoint
from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error
from mamba_cli.files import inside, is_strict_json, read_json
from mamba_cli.formats import get_format
from mamba_cli.formats.format import EMBEDDING, Format
from mamba_cli.publish import check_destination, new_folder
from mamba_cli.quantize.saved import carry_section
from mamba_cli.schema import KEPT_IN_STORED_DTYPE
from mamba_cli.storage import StoredTensor, dtype_name, same_bits, weight_files, weights_entry
from mamba_cli.tokenizer import TOKENIZER_FILES, find_tokenizer, load_tokenizer
from mamba_cli.writing import parse_size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_SHARD_SIZE = "5GB"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Logits of equal tensors differ by nothing; this leaves room for another order of adding up.
LOGITS_TOLERANCE = 1e-5
VERIFIED_TOKENS = 64

OnProgress = Callable[[float], object]


@dataclass(frozen=True)
class Conversion:
    """What was done.

    copied: whether the files are the source's own, byte for byte; nbytes: of all tensors;
    tokenizer: where its files came from; logits_difference: relative, in norm, None where it was not
    asked for; notes: what the user should know.
    """

    source: str
    destination: Path
    source_format: str
    format: str
    dtype: str
    copied: bool
    tensors: int
    nbytes: int
    files: tuple[str, ...]
    tokenizer: str | None
    logits_difference: float | None
    notes: tuple[str, ...]


def convert(
    model: str | Path,
    destination: str | Path,
    to: str,
    dtype: str | None = None,
    weights: str | None = None,
    max_shard_size: str | None = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
    verify: bool = False,
    revision: str | None = None,
    on_progress: OnProgress = lambda share: None,
) -> Conversion:
    """Write `model` (a folder or a repo id) to the folder `destination` in the format `to`.

    dtype: a name of DTYPES, None to keep what is stored (A_log, D and dt_bias are never narrowed);
    weights: "safetensors" or "bin", the latter for state-spaces only and its default, as mamba_ssm reads
    nothing else; max_shard_size: of safetensors, as "5GB"; tokenizer: folder, file or repo id; verify:
    compare the logits of both, too; on_progress: is called with shares of the work, 1 in all.
    Within one format, with nothing else asked for, the files are copied. Raises Mamba2Error, and leaves
    nothing behind, where the source is broken or the target cannot hold the model.
    """
    destination = Path(destination).expanduser()
    target = get_format(to)
    source = open_checkpoint(model, revision)
    check_destination(destination, source.folder, overwrite)
    wanted = _wanted_dtype(dtype)
    tensors = {name: _cast(name, tensor, wanted) for name, tensor in source.tensors.items()}
    as_pickle = _as_pickle(source, to, weights, max_shard_size)
    shard_size = parse_size(max_shard_size or DEFAULT_SHARD_SIZE)
    unchanged = tensors == source.tensors
    same_files = unchanged and max_shard_size is None and _can_copy(source, to, as_pickle)
    if to != source.format:
        _check_limits(target, source.config)
    config, found, notes = _tokenizer(source, tokenizer)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())

    def advance(written_or_read: int) -> None:
        on_progress(written_or_read / (2 * nbytes))

    with new_folder(destination) as folder:
        if same_files:
            _copy_files(source, folder)
            advance(nbytes)
        else:
            keep = read_json(inside(source.folder, "config.json")) if to == source.format else None
            target.write(folder, config, tensors, shard_size, as_pickle, keep, advance)
        _copy_tokenizer(source, found, folder)
        carry_section(source, folder)
        _check_written(folder, source.config, tensors, advance)
        difference = logits_difference(source.folder, folder) if verify else None
        _check_difference(difference, exact=unchanged)
        files = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))

    return Conversion(
        source=str(model),
        destination=destination,
        source_format=source.format,
        format=to,
        dtype=dtype_name(tensors[EMBEDDING].dtype),
        copied=same_files,
        tensors=len(tensors),
        nbytes=nbytes,
        files=files,
        tokenizer=str(found) if found else None,
        logits_difference=difference,
        notes=source.notes + notes,
    )


def logits_difference(first: Path, second: Path) -> float:
    """Return the norm of the difference of two models' logits over the norm of the first's.

    Both in fp32 on the CPU, one after the other, for one text of random tokens.
    """
    from mamba_cli.load import load_model

    logits = []
    for folder in (first, second):
        model = load_model(folder.resolve(), device="cpu", dtype="float32")
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (1, VERIFIED_TOKENS), generator=generator)
        with torch.inference_mode():
            logits.append(model(ids).double())
    return ((logits[1] - logits[0]).norm() / logits[0].norm()).item()


def _wanted_dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise Mamba2Error(f"dtype: expected one of {', '.join(DTYPES)}, got {name}")
    return DTYPES[name] if name else None


def _cast(name: str, tensor: StoredTensor, dtype: torch.dtype | None) -> StoredTensor:
    if dtype is None or tensor.dtype == dtype:
        return tensor
    narrower = torch.promote_types(tensor.dtype, dtype) != dtype
    if narrower and name.endswith(KEPT_IN_STORED_DTYPE):
        return tensor
    return replace(tensor, dtype=dtype, load=partial(_load_as, tensor, dtype))


def _load_as(tensor: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    stored = tensor.load()
    converted = stored.to(dtype)
    if not converted.isfinite().all() and stored.isfinite().all():
        raise Mamba2Error(
            f"{tensor.name}: expected values that {dtype} can hold (up to {torch.finfo(dtype).max:g}), got "
            f"{stored.abs().max().item():g}"
        )
    return converted


def _as_pickle(source: Checkpoint, to: str, weights: str | None, max_shard_size: str | None) -> bool:
    if weights not in (None, "safetensors", "bin"):
        raise Mamba2Error(f"weights: expected safetensors or bin, got {weights}")
    if to != "state-spaces":
        if weights == "bin":
            raise Mamba2Error(f"weights: expected safetensors for {to}, got bin, which only state-spaces has")
        return False
    if weights is None and source.format == to:
        as_pickle = _is_pickle(source)
    else:
        as_pickle = weights != "safetensors"
    if as_pickle and max_shard_size is not None:
        raise Mamba2Error(
            "max-shard-size: expected safetensors, got a .bin, which is always one file",
            "--safetensors writes as many files as it takes",
        )
    return as_pickle


def _is_pickle(source: Checkpoint) -> bool:
    return weight_files(source.folder)[0].suffix != ".safetensors"


def _can_copy(source: Checkpoint, to: str, as_pickle: bool) -> bool:
    """Whether the source's files are of the kind asked for, and right as they are."""
    strict = is_strict_json(source.folder / "config.json")
    return source.format == to and as_pickle == _is_pickle(source) and strict and not source.notes


def _copy_files(source: Checkpoint, folder: Path) -> None:
    weights = {weights_entry(source.folder), *weight_files(source.folder)}
    for path in [source.folder / "config.json", *sorted(weights)]:
        copy = folder / path.relative_to(source.folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _check_limits(target: Format, config: ModelConfig) -> None:
    reasons = target.cannot_hold(config)
    if reasons:
        raise Mamba2Error(
            f"{target.name}: expected a model that {target.title} can hold, got {', and '.join(reasons)}"
        )


def _tokenizer(source: Checkpoint, name: str | None) -> tuple[ModelConfig, Path | None, tuple[str, ...]]:
    """Return the configuration with the tokenizer's special ids, where the tokenizer is, and notes.

    Weights convert without a tokenizer: only one that was named has to be there and fit the model.
    """
    config, found = source.config, None
    try:
        found = find_tokenizer(source.folder, config, name)
        tokenizer = load_tokenizer(source, name)
    except Mamba2Error as error:
        if name is not None:
            raise
        lost = "no tokenizer was copied" if found is None else "no special tokens were read"
        hint = f" ({error.hint})" if error.hint else ""
        return config, found, (f"{lost}: {error.message}{hint}",)
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    # A tokenizer that was named replaces the model's own, and so do its ids.
    new = {key for key in ids if name is not None or getattr(config, key) is None}
    return replace(config, **{key: ids[key] for key in new if ids[key] is not None}), found, ()


def _copy_tokenizer(source: Checkpoint, found: Path | None, folder: Path) -> None:
    files = [inside(source.folder, "generation_config.json")]
    if found is not None and found.is_dir():
        files += [inside(found, path.name) for pattern in TOKENIZER_FILES for path in found.glob(pattern)]
    for path in files:
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    if found is not None and found.is_file():
        shutil.copyfile(found, folder / ("tokenizer.json" if found.suffix == ".json" else found.name))


def _check_written(
    folder: Path, config: ModelConfig, tensors: dict[str, StoredTensor], on_read: Callable[[int], object]
) -> None:
    """Open what was written as any checkpoint, and compare all of it with what it was made from."""
    written = open_checkpoint(folder)
    found, expected = _function(written.config), _function(config)
    differing = [key for key, value in expected.items() if found[key] != value]
    if differing:
        raise Mamba2Error(f"written configuration: expected the source's, got other {', '.join(differing)}")
    for name, tensor in tensors.items():
        if not same_bits(written.tensors[name].load(), tensor.load()):
            raise Mamba2Error(f"written {name}: expected the source's values, got others: is the disk sound?")
        on_read(tensor.nbytes)


def _function(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that say what a model computes. Formats need not keep the others."""
    fields = dataclasses.asdict(config)
    unused = TOKEN_IDS if config.rmsnorm else (*TOKEN_IDS, "gated_norm_eps")
    return {key: value for key, value in fields.items() if key not in unused}


def _check_difference(difference: float | None, exact: bool) -> None:
    if difference is None:
        return
    # Of other dtypes the difference is rounding, and the user's to judge. (A NaN is below nothing.)
    limit = LOGITS_TOLERANCE if exact else float("inf")
    if not difference < limit:
        raise Mamba2Error(f"logits: expected a relative difference below {limit:g}, got {difference:g}")
