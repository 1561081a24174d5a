"""Writes docs/commands.md from the commands' own --help: `python docs/generate.py`."""

import contextlib
import io
import os
from pathlib import Path
from unittest import mock

from mamba_commands.app import COMMANDS, main

PAGE = Path(__file__).with_name("commands.md")


def commands_page() -> str:
    """Return the page: the help of `mamba2`, then that of each command."""
    parts = ["# Commands\n\nThe `--help` of each command, written here by `python docs/generate.py`.\n"]
    for name in ("mamba2", *(f"mamba2 {command.name}" for command in COMMANDS)):
        parts.append(f"## {name}\n\n```text\n{_help(name.split()[1:])}\n```\n")
    return "\n".join(parts)


def _help(arguments: list[str]) -> str:
    written = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="80"), contextlib.redirect_stdout(written):
        status = main([*arguments, "--help"])
    if status:
        raise SystemExit(f"{' '.join(arguments)} --help: expected exit status 0, got {status}")
    return written.getvalue().strip()


if __name__ == "__main__":
    PAGE.write_text(commands_page(), encoding="utf-8")
