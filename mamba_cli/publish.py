"""Output folders that are there whole or not at all."""

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mamba_cli.errors import Mamba2Error


def check_destination(destination: Path, source: Path, overwrite: bool) -> None:
    """Refuse a destination that cannot be written, or would touch the source, or what else is to stay."""
    target, origin = destination.resolve(), source.resolve()
    if target == origin:
        raise Mamba2Error(f"{destination}: expected a new folder, got the source itself")
    if target.is_relative_to(origin):
        raise Mamba2Error(f"{destination}: expected a folder outside the source, got one inside {source}")
    for what, place in (("source", origin), ("current folder", Path.cwd()), ("home folder", Path.home())):
        if place.is_relative_to(target):
            raise Mamba2Error(f"{destination}: expected a new folder, got one that holds the {what}")
    nearest = next(folder for folder in target.parents if folder.exists())
    try:  # what permissions say of a folder is not all that decides
        Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=nearest)).rmdir()
    except OSError as error:
        reason = f"{nearest}: {error.strerror or error}"
        raise Mamba2Error(f"{destination}: expected a place to write, got: {reason}") from error
    if not target.exists():
        return
    if not target.is_dir():
        raise Mamba2Error(f"{destination}: expected a folder to write, got a file of that name")
    if any(target.iterdir()) and not overwrite:
        raise Mamba2Error(
            f"{destination}: expected a new or empty folder, got one with files", "--overwrite replaces it"
        )


@contextlib.contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the destination's name, and place, when the block ends well.

    What was there stays until then. After an error, or an interruption, nothing is left.
    """
    target = destination.resolve()
    partial = _sibling(target, "partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        _put(partial, target)
    except OSError as error:
        reason = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
        raise Mamba2Error(f"{destination}: expected to write it, got: {reason}; nothing was left") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put(folder: Path, target: Path) -> None:
    if not target.exists():
        folder.rename(target)
        return
    old = _sibling(target, "old")
    target.rename(old)
    try:
        folder.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sibling(target: Path, kind: str) -> Path:
    """Return a hidden name in the same folder, so that a rename neither copies nor can be half done."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.{kind}")
