"""Tensors in files, read one at a time when they are asked for.

Weights are untrusted: a safetensors header is checked against the file before the safetensors library
sees it, a pickle is read without running what it holds, and no size is believed before the file was
seen to be that large. Tensors are views of the mapped file, so reading one costs no more than itself.
"""

import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mamba_cli.errors import Mamba2Error
from mamba_cli.files import file_size, inside, read_json

# Where a folder's weights are looked for, the first that is there wins.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER = 100_000_000  # the safetensors library's own limit, in bytes

# A mapped pickle is closed and mapped anew once this many bytes of it were read: pages that were
# touched count as this process's memory until then.
MAPPED_BYTES = 64 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its key there, shape and dtype, and `load()`, which reads it (CPU)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name people write: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by their keys, whatever files they are in."""
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        found = open_tensors(path)
        twice = next(iter(tensors.keys() & found.keys()), None)
        if twice:
            raise Mamba2Error(f"{path}: expected each tensor in one file, got {twice} a second time")
        tensors |= found
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a folder's weights: one, or the shards that its index names."""
    path = weights_entry(folder)
    if not path.name.endswith(".index.json"):
        return [path]
    shards = [inside(folder, shard) for shard in shard_names(path)]
    for shard in shards:
        if not shard.is_file():
            raise Mamba2Error(f"{path}: expected the shard {shard.name}, got no such file")
    return shards


def weights_entry(folder: Path) -> Path:
    """Return the file with a folder's weights, or the index that says which files they are in."""
    for name in WEIGHTS:
        if os.path.lexists(folder / name):
            return inside(folder, name)
    raise Mamba2Error(f"{folder}: expected weights in it ({', '.join(WEIGHTS)}), got none of these files")


def shard_names(index: Path) -> list[str]:
    """Return the names of the shards in an index, as they stand there."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise Mamba2Error(f"{index} weight_map: expected the shard of each tensor, got {names!r:.100}")
    return sorted(set(names.values()))


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one .safetensors file or PyTorch pickle by their keys."""
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same to the last bit, NaN and the sign of zero included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, (nbytes,) of uint8; a view where the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _open_safetensors(path: Path) -> dict[str, StoredTensor]:
    header = _read_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except SafetensorError as error:
        raise Mamba2Error(f"{path}: expected safetensors, got: {error}") from error
    return {
        name: StoredTensor(
            name,
            tuple(entry["shape"]),
            SAFETENSORS_DTYPES[entry["dtype"]],
            partial(_load_safetensors, path, name),
        )
        for name, entry in header.items()
    }


def _load_safetensors(path: Path, name: str) -> torch.Tensor:
    # Opened for each tensor, so that its mapping goes when the tensor goes.
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _read_header(path: Path) -> dict[str, Any]:
    """Return the header's entries, each of a known dtype and inside the file, which ends with the last.

    Format: 8 bytes of header length, little-endian; the header in JSON; the data.
    (https://huggingface.co/docs/safetensors, "Format")
    """
    size = file_size(path, "safetensors")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MAX_HEADER):
            raise Mamba2Error(
                f"{path}: expected a safetensors header of at most {max(size - 8, 0)} bytes, got a length of "
                f"{length}: cut short, or no safetensors file"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        ends = [_data_end(entry) for entry in header.values()]
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise Mamba2Error(f"{path}: expected a safetensors header, got: {error}") from error
    needed = 8 + length + max(ends, default=0)
    if size != needed:
        cause = "cut short" if size < needed else "with bytes after its end"
        raise Mamba2Error(f"{path}: expected {needed} bytes as its header says, got {size}: {cause}")
    return header


def _data_end(entry: dict[str, Any]) -> int:
    """Return where a header entry's data ends. Raises ValueError where it contradicts itself."""
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if entry["dtype"] not in SAFETENSORS_DTYPES:
        raise ValueError(f"dtype {entry['dtype']}, which is not known here")
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"shape {shape} at {start} to {end}")
    nbytes = math.prod(shape) * SAFETENSORS_DTYPES[entry["dtype"]].itemsize
    if end - start != nbytes:
        raise ValueError(f"shape {shape} of {entry['dtype']}, {nbytes} bytes, in {end - start} bytes")
    return end


def _open_pickle(path: Path) -> dict[str, StoredTensor]:
    file = _MappedPickle(path)
    return {
        name: StoredTensor(name, tuple(tensor.shape), tensor.dtype, partial(file.load, name))
        for name, tensor in file.tensors.items()
    }


class _MappedPickle:
    """A pickle's tensors, mapped and not read, and mapped anew before much of it was read."""

    def __init__(self, path: Path):
        self._path = path
        self._read = 0
        self.tensors = _load_pickle(path)

    def load(self, name: str) -> torch.Tensor:
        if self._read > MAPPED_BYTES:
            self.tensors = _load_pickle(self._path)
            self._read = 0
        tensor = self.tensors[name]
        self._read += tensor.nbytes
        return tensor


def _load_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict that torch.save wrote, on the CPU, without running any of it."""
    size = file_size(path, "a PyTorch state dict")
    _check_archive(path, size)
    try:
        contents = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        found = f"a pickle that wants to run {wanted[1]}" if wanted else "a pickle that does more"
        raise Mamba2Error(
            f"{path}: expected only tensors, got {found}: refused",
            "only its author can say what it is for; a .safetensors file cannot hold code",
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise Mamba2Error(f"{path}: expected a PyTorch state dict, got: {first_line}") from error
    if not isinstance(contents, dict):
        raise Mamba2Error(f"{path}: expected tensors by name, got {type(contents).__name__}")
    return {str(name): _plain(path, name, value, size) for name, value in contents.items()}


def _check_archive(path: Path, size: int) -> None:
    """Refuse what torch would unpack or read whole: only stored records can be mapped."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise Mamba2Error(
                f"{path}: expected a PyTorch archive (of 1.6 or later), got a plain pickle or another file: "
                "not opened"
            )
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise Mamba2Error(f"{path}: expected a whole PyTorch archive, got: {error}: cut short") from error
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.header_offset + record.file_size > size:
            raise Mamba2Error(f"{path}: expected plain records, got {record.filename} packed or cut short")


def _plain(path: Path, name: Any, value: Any, size: int) -> torch.Tensor:
    """Return a dense tensor that the file is large enough for (a stride of 0 needs no bytes)."""
    if not isinstance(value, torch.Tensor):
        raise Mamba2Error(f"{path}: expected tensors by name, got {name!r}: {type(value).__name__}")
    plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
    if not plain or value.nbytes > size:
        raise Mamba2Error(
            f"{path} {name}: expected a dense tensor of at most {size} bytes, got {tuple(value.shape)} "
            f"of {value.layout} on {value.device.type}"
        )
    return value.detach()
