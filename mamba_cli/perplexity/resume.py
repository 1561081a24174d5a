"""What an interrupted measurement has scored so far, in a file that continues it."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mamba_cli.errors import Mamba2Error

# Saving may take at most this share of the time, and happens at most once in so many seconds.
SAVE_SHARE = 0.05
SAVE_SECONDS = 2.0
BATCH_SIZE = "batch size"


class ResumeFile:
    """Scores (columns, predictions), NaN where still to do, bound to one measurement.

    key: everything that the scores follow from (model, text, windows), by name. A file that was
    written under another key is refused, naming the first difference.
    """

    def __init__(self, path: Path, key: Mapping[str, object]):
        if not path.parent.is_dir():
            raise Mamba2Error(f"{path}: expected an existing folder to write it to, got {path.parent}")
        self.path = path
        self._key = {name: str(value) for name, value in key.items()}
        self._stored = self._read_key()
        self._due = 0.0

    @property
    def batch_size(self) -> int | None:
        """The batch size of the run that wrote the file: sums in other batches round otherwise."""
        return None if self._stored is None else int(self._stored[BATCH_SIZE])

    def open(self, batch_size: int, scores: torch.Tensor) -> None:
        """Fill `scores` from the file; leave them as they are where there is none yet."""
        self._key[BATCH_SIZE] = str(batch_size)
        if self._stored is None:
            return
        for name, value in self._key.items():
            found = self._stored.get(name)
            if found != value:
                raise Mamba2Error(
                    f"{self.path}: expected the same measurement, {name} {value}, got {found}",
                    hint="name another --resume file, or delete this one",
                )
        with self._reading(), safe_open(self.path, "pt") as file:
            stored = file.get_slice("scores")
            if stored.get_shape() != list(scores.shape) or stored.get_dtype() != "F64":
                raise ValueError
            scores.copy_(stored[:])

    def save_when_due(self, scores: torch.Tensor) -> None:
        """Save unless that was done a moment ago."""
        if time.monotonic() >= self._due:
            self.save(scores)

    def save(self, scores: torch.Tensor) -> None:
        """Write the file in one piece: a kill at any moment leaves the last whole one."""
        start = time.monotonic()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            save_file({"scores": scores}, temporary, metadata={"measurement": json.dumps(self._key)})
            os.replace(temporary, self.path)
        except (OSError, SafetensorError) as error:
            raise Mamba2Error(f"{self.path}: expected to write it, got {error}") from None
        finally:
            temporary.unlink(missing_ok=True)
        end = time.monotonic()
        self._due = end + max(SAVE_SECONDS, (end - start) / SAVE_SHARE)

    def _read_key(self) -> dict[str, str] | None:
        if not self.path.exists():
            return None
        with self._reading(), safe_open(self.path, "pt") as file:
            stored = json.loads(file.metadata()["measurement"])
            int(stored[BATCH_SIZE])
            return stored

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, KeyError, TypeError, ValueError, OSError):
            raise Mamba2Error(
                f"{self.path}: expected a file that an interrupted eval-ppl wrote, got something else"
            ) from None
