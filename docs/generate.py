"""Writes docs/commands.md from the commands' own --help, and the README's table of measured speeds.

PYTHONPATH=.:kernels:commands python docs/generate.py
"""

import contextlib
import io
import json
import os
from pathlib import Path
from unittest import mock

from mamba_commands.app import COMMANDS, main

PAGE = Path(__file__).with_name("commands.md")
README = Path(__file__).parent.parent / "README.md"
RESULTS = README.parent / "benchmarks" / "results" / "gpu_table.json"


def commands_page() -> str:
    """Return the page: the help of `mamba2`, then that of each command."""
    parts = ["# Commands\n\nThe `--help` of each command, written here by `python docs/generate.py`.\n"]
    for name in ("mamba2", *(f"mamba2 {command.name}" for command in COMMANDS)):
        parts.append(f"## {name}\n\n```text\n{_help(name.split()[1:])}\n```\n")
    return "\n".join(parts)


def readme() -> str:
    """Return the README with its table made from what benchmarks/gpu_table.py wrote."""
    before, rest = README.read_text(encoding="utf-8").split("<!-- speed -->\n")
    after = rest.split("<!-- /speed -->")[1]
    return f"{before}<!-- speed -->\n{speed_table()}<!-- /speed -->{after}"


def speed_table() -> str:
    """Return the rows as a Markdown table, with a line on where they were measured."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    machine = results["machine"]
    lines = [
        f"{machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}; random weights in bf16.",
        "The bound is bytes over bandwidth or operations over rate. The figures of mamba_ssm 2.3.2 are from",
        "an earlier run on the same kind of machine.",
        "",
        "| work | mamba2 | mamba_ssm | bound |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in results["rows"]:
        peer = row["mamba_ssm"] or "-"
        lines.append(f"| {row['work']}, {row['unit']} | {row['ours']:.4g} | {peer} | {row['bound']} |")
    return "\n".join(lines) + "\n"


def _help(arguments: list[str]) -> str:
    written = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="80"), contextlib.redirect_stdout(written):
        status = main([*arguments, "--help"])
    if status:
        raise SystemExit(f"{' '.join(arguments)} --help: expected exit status 0, got {status}")
    return written.getvalue().strip()


if __name__ == "__main__":
    PAGE.write_text(commands_page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
