"""Tensors to files, one at a time: memory stays near the largest tensor whatever the model's size.

The libraries' own savers take a whole state dict in memory. What is written here is read back with them.
"""

import io
import json
import math
import pickle
import re
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mamba_cli.errors import Mamba2Error
from mamba_cli.files import write_json
from mamba_cli.storage import SAFETENSORS_DTYPES, StoredTensor, as_bytes

SIZE = re.compile(r"([0-9.]+) *([KMG]i?)?B?", re.IGNORECASE)
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}

# Of a zip archive (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.7 and 4.5): bytes of
# a record's header, of its extra field for large records, and an extra field of zeros, which is ignored.
ZIP_HEADER = 30
ZIP64_EXTRA = 20
ZIP64_FROM = 1 << 30
PADDING = struct.Struct("<HH")
PADDING_ID = 0x4246
ALIGNMENT = 64

OnWrite = Callable[[int], object]


def parse_size(text: str) -> int:
    """Return the bytes that "5GB", "500 MiB" or "1000" means."""
    matched = SIZE.fullmatch(text.strip())
    try:
        size = int(float(matched[1]) * UNITS[(matched[2] or "").upper()]) if matched else 0
    except ValueError:  # two points
        size = 0
    if size < 1:
        raise Mamba2Error(f"size: expected a number of bytes such as 5GB or 500MB, got {text}")
    return size


def write_safetensors(
    folder: Path, tensors: Sequence[StoredTensor], max_shard_size: int, on_write: OnWrite
) -> None:
    """Write model.safetensors, or shards of at most max_shard_size bytes of data and their index.

    A tensor larger than that has a shard of its own.
    """
    shards = _split(tensors, max_shard_size)
    if len(shards) == 1:
        _write_safetensors_file(folder / "model.safetensors", shards[0], on_write)
        return
    names = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_safetensors_file(folder / name, shard, on_write)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {
            tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        },
    }
    write_json(folder / "model.safetensors.index.json", index)


def _split(tensors: Sequence[StoredTensor], max_shard_size: int) -> list[list[StoredTensor]]:
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_safetensors_file(path: Path, tensors: Sequence[StoredTensor], on_write: OnWrite) -> None:
    """Format: https://huggingface.co/docs/safetensors, "Format"; transformers wants the metadata."""
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": names[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(as_bytes(_load(tensor)).numpy())
            on_write(tensor.nbytes)


def write_pickle(
    path: Path, tensors: Sequence[StoredTensor], same: Mapping[str, str], on_write: OnWrite
) -> None:
    """Write a state dict as torch.save does, with the names in `same` sharing another tensor's storage.

    That is an archive of a pickle, `data.pkl`, whose tensors refer to the records `data/0`, `data/1`, ...
    """
    storages = {
        tensor.name: _Storage(str(key), tensor.dtype, math.prod(tensor.shape))
        for key, tensor in enumerate(tensors)
    }
    contents = OrderedDict((tensor.name, _Tensor(storages[tensor.name], tensor.shape)) for tensor in tensors)
    contents |= {name: contents[other] for name, other in same.items()}
    stream = io.BytesIO()
    _StateDictPickler(stream, protocol=2).dump(contents)
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        _write_record(archive, file.tell(), "data.pkl", stream.getvalue())
        _write_record(archive, file.tell(), "byteorder", sys.byteorder.encode())
        for tensor in tensors:
            record = as_bytes(_load(tensor)).numpy()
            name = f"data/{storages[tensor.name].key}"
            _write_record(archive, file.tell(), name, memoryview(record))
            on_write(tensor.nbytes)
        _write_record(archive, file.tell(), "version", b"3\n")


def _write_record(archive: zipfile.ZipFile, position: int, name: str, data: bytes | memoryview) -> None:
    """Add a record at `position` as it is, its data aligned for mapping as torch's own writer does.

    (torch's writer itself ends the process when the disk is full.)
    """
    info = zipfile.ZipInfo(f"archive/{name}")
    large = len(data) > ZIP64_FROM
    before = position + ZIP_HEADER + len(info.filename) + PADDING.size + (ZIP64_EXTRA if large else 0)
    padding = -before % ALIGNMENT
    info.extra = PADDING.pack(PADDING_ID, padding) + bytes(padding)
    with archive.open(info, "w", force_zip64=large) as record:
        record.write(data)


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    shape: tuple[int, ...]


class _StateDictPickler(pickle.Pickler):
    """Pickles _Tensor and _Storage as torch.save pickles a tensor and its storage."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Tensor):
            return NotImplemented
        strides = torch.empty(value.shape, device="meta").stride()
        arguments = (value.storage, 0, value.shape, strides, False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        kind = {
            torch.float64: torch.DoubleStorage,
            torch.float32: torch.FloatStorage,
            torch.float16: torch.HalfStorage,
            torch.bfloat16: torch.BFloat16Storage,
        }[value.dtype]
        return "storage", kind, value.key, "cpu", value.numel


def _load(tensor: StoredTensor) -> torch.Tensor:
    loaded = tensor.load()
    if tuple(loaded.shape) != tensor.shape or loaded.dtype != tensor.dtype:
        raise Mamba2Error(
            f"{tensor.name}: expected shape {tensor.shape} in {tensor.dtype} as before, got "
            f"{tuple(loaded.shape)} in {loaded.dtype}: the file was changed meanwhile"
        )
    return loaded
