"""What every checkpoint format does, and what formats that keep a config.json share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error
from mamba_cli.files import inside, read_json, write_json
from mamba_cli.storage import StoredTensor, open_weights
from mamba_cli.writing import write_pickle, write_safetensors

EMBEDDING = "backbone.embedding.weight"
HEAD = "lm_head.weight"
FIRST_MIXER = "backbone.layers.0.mixer."

Shapes = Mapping[str, tuple[int, ...]]

# A step of time is an fp32 number, so a limit from here on limits nothing.
LARGEST_DT = torch.finfo(torch.float32).max

# The fields of ModelConfig that Mamba-1 has no choice in.
MAMBA1: dict[str, Any] = {
    "layer": "Mamba1",
    "headdim": 1,
    "ngroups": 1,
    "chunk_size": 256,
    "D_has_hdim": False,
    "rmsnorm": False,
    "norm_before_gate": False,
    "dt_limit": (0.0, math.inf),
    "gated_norm_eps": 1e-5,
}


class Format(ABC):
    """A folder with config.json and weights. Each format says how that configuration is read and written.

    name: what --to takes; title: what people read; writes_tied_head: whether lm_head.weight is in the
    files even where it is the embedding; refuses_other_keys: whether the format's own library fails on a
    key of config.json that it does not know.
    """

    name: str
    title: str
    writes_tied_head = False
    refuses_other_keys = False

    @abstractmethod
    def recognise(self, config: dict[str, Any]) -> str | None:
        """Return why a config.json is of this format, or None."""

    @abstractmethod
    def read_config(self, config: dict[str, Any], shapes: Shapes) -> ModelConfig:
        """Return the configuration. shapes, by canonical name, may only decide what config leaves out."""

    @abstractmethod
    def write_config(self, config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Return the config.json of a model that cannot_hold had nothing against."""

    @abstractmethod
    def cannot_hold(self, config: ModelConfig) -> list[str]:
        """Return what this format has no place for, in words; nothing where it can hold the model."""

    def canonical_name(self, stored: str) -> str:
        """Return mamba_ssm's name of a tensor. Names of no known tensor stay as they are."""
        return stored

    def stored_name(self, name: str) -> str:
        """Return this format's name of a tensor."""
        return name

    def detect(self, path: Path) -> str | None:
        """Return why the checkpoint at `path` is of this format, or None."""
        if not (path / "config.json").exists():
            return None
        return self.recognise(read_json(inside(path, "config.json")))

    def read(self, folder: Path) -> tuple[ModelConfig, dict[str, StoredTensor]]:
        """Return the configuration and the tensors by canonical name, neither checked by the other."""
        tensors: dict[str, StoredTensor] = {}
        for stored, tensor in open_weights(folder).items():
            name = self.canonical_name(stored)
            if name in tensors:
                raise Mamba2Error(f"{folder}: expected one {name}, got {tensors[name].name} and {stored}")
            tensors[name] = tensor
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return self.read_config(read_json(inside(folder, "config.json")), shapes), tensors

    def write(
        self,
        folder: Path,
        config: ModelConfig,
        tensors: dict[str, StoredTensor],
        max_shard_size: int,
        as_pickle: bool = False,
        keep: dict[str, Any] | None = None,
        on_write: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        """Write a checkpoint into an empty folder, one tensor at a time.

        keep: a config.json of this format whose other keys are kept; on_write is called with the
        bytes of each tensor.
        """
        written = self.write_config(config, tensors[EMBEDDING].dtype)
        write_json(folder / "config.json", _merge(keep or {}, written))
        renamed = [replace(tensor, name=self.stored_name(name)) for name, tensor in tensors.items()]
        tied = config.tie_embeddings and self.writes_tied_head
        if as_pickle:
            same = {HEAD: self.stored_name(EMBEDDING)} if tied else {}
            write_pickle(folder / "pytorch_model.bin", renamed, same, on_write)
            return
        if tied:
            renamed.append(replace(tensors[EMBEDDING], name=HEAD))
        write_safetensors(folder, renamed, max_shard_size, on_write)


class Fields:
    """Typed access to the keys of a configuration; what is missing or of another type is an error."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json"):
        self._values = values
        self._where = where

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def integer(self, key: str) -> int:
        return self._get(key, int, "an integer")

    def flag(self, key: str) -> bool:
        return self._get(key, bool, "true or false")

    def text(self, key: str) -> str:
        return self._get(key, str, "a text")

    def section(self, key: str) -> dict[str, Any]:
        return self._get(key, dict, "an object")

    def number(self, key: str) -> float:
        value = self._get(key, (int, float), "a number")
        if not math.isfinite(value):
            raise Mamba2Error(f"{self._where} {key}: expected a finite number, got {value}")
        return float(value)

    def product(self, key: str, size: int) -> int:
        """Return `key` (it may be a fraction, as 1.5) times `size`, which has to be a whole number."""
        value = self.number(key) * size
        if not value.is_integer():
            raise Mamba2Error(f"{self._where} {key}: expected a whole number times {size}, got {value}")
        return int(value)

    def token_id(self, key: str) -> int | None:
        """Return a token id, the first of a list, or None."""
        value = self._values.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if value is not None and type(value) is not int:
            raise Mamba2Error(f"{self._where} {key}: expected a token id, got {value!r}")
        return value

    def dt_limit(self, key: str) -> tuple[float, float]:
        """Return the limits of dt. Infinity has many spellings: null, absent, Infinity, __float__."""
        value = self._values.get(key)
        if value is None:
            return 0.0, math.inf
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise Mamba2Error(f"{self._where} {key}: expected a lower and an upper limit, got {value!r}")
        low, high = (
            item["__float__"] if isinstance(item, dict) and "__float__" in item else item for item in value
        )
        try:
            limits = float(low or 0.0), math.inf if high is None else float(high)
        except (TypeError, ValueError) as error:
            raise Mamba2Error(f"{self._where} {key}: expected two numbers, got {value!r}") from error
        return limits[0], math.inf if limits[1] >= LARGEST_DT else limits[1]

    def _get(self, key: str, kind: type | tuple[type, ...], expected: str) -> Any:
        value = self._values.get(key)
        # bool is an int to Python, and true is no size
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            found = "nothing" if value is None else repr(value)
            raise Mamba2Error(f"{self._where} {key}: expected {expected}, got {found}")
        return value


def spell_dt_limit(config: ModelConfig, key: str) -> dict[str, Any]:
    """Return {key: [low, high]} in strict JSON for every version of a format's library.

    No limit is left out, as all of them then take none, and an upper one at infinity is the largest
    fp32 number: Infinity is no JSON, and null and {"__float__": ...} are not read by all.
    """
    low, high = config.dt_limit
    if (low, high) == (0.0, math.inf):
        return {}
    return {key: [float(low), min(float(high), LARGEST_DT)]}


def spell_floats(value: Any) -> Any:
    """Return a configuration whose infinities and NaN are written as transformers writes them."""
    if isinstance(value, dict):
        return {key: spell_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [spell_floats(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    return value


def _merge(kept: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with what is written, and with what was kept in the keys that no one reads."""
    lists = {key for key, value in kept.items() if key.endswith("_token_id") and isinstance(value, list)}
    kept = {key: value for key, value in kept.items() if key != "torch_dtype"}  # the old name of dtype
    return spell_floats(kept) | {key: value for key, value in written.items() if key not in lists}


def dimension(shapes: Shapes, name: str, axis: int) -> int | None:
    """Return one size of a tensor, or None where it is not stored or has no such axis."""
    shape = shapes.get(name, ())
    return shape[axis] if axis < len(shape) else None


def count_layers(names: Mapping[str, Any]) -> int:
    """Return the number of layers that tensors with these canonical names belong to."""
    parts = (name.split(".") for name in names if name.startswith("backbone.layers."))
    return len({part[2] for part in parts if len(part) > 2})
