"""The frame of the command line: help, exit statuses, closed pipes, interrupts, one-line failures."""

import os
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Callable

import pytest
import typer

from mamba_cli.errors import Mamba2Error
from mamba_commands import app

# A command `probe` with this body, run by main() in a process of its own.
PROBE = """
import sys, types
from mamba_commands import app, output

def probe():
    out = output.Output()
    {body}

sys.modules["mamba_commands.probe"] = types.SimpleNamespace(probe=probe)
app.COMMANDS = (*app.COMMANDS, app.Command("probe", "probe", "probe", "Probe."))
sys.exit(app.main(["probe"]))
"""
FOREVER = "while True: out.data('line ' * 200)"


def start(code: str, **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **options.pop("env", {})}
    environment.pop("MAMBA2_DEBUG", None)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
    )


def finish(process: subprocess.Popen) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture
def probe(monkeypatch, capfd):
    """Run a function as the command `probe` in this process; return (status, stdout, stderr)."""
    monkeypatch.delenv("MAMBA2_DEBUG", raising=False)
    monkeypatch.setattr(app, "COMMANDS", (*app.COMMANDS, app.Command("probe", "probe", "probe", "Probe.")))

    def run(function: Callable[..., None], *arguments: str):
        monkeypatch.setitem(sys.modules, "mamba_commands.probe", types.SimpleNamespace(probe=function))
        capfd.readouterr()
        status = app.main(["probe", *arguments])
        return status, *capfd.readouterr()

    return run


def raising(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(capfd, arguments):
    assert app.main(arguments) == 0
    out, err = capfd.readouterr()
    for command in app.COMMANDS:
        assert f"  {command.name} " in out and command.summary in out
    assert err == ""


def test_version_is_one_line(capfd):
    assert app.main(["--version"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("mamba2 ") and out.count("\n") == 1 and err == ""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([c.name, "--help"] for c in app.COMMANDS)]
)
def test_help_and_version_import_nothing_heavy(arguments):
    heavy = {"torch", "transformers", "triton", "numpy", "huggingface_hub", "tokenizers", "pyarrow", "gguf"}
    code = f"""
import sys
from mamba_commands.app import main
status = main({arguments})
sys.exit(status or str(sorted({heavy} & set(sys.modules))))
"""
    _, out, err = finish(start(code))
    assert err == b"[]\n" and out


@pytest.mark.parametrize("columns", [60, 100])
@pytest.mark.parametrize("arguments", [["--help"], *([c.name, "--help"] for c in app.COMMANDS)])
def test_help_fits_the_terminal_and_cuts_nothing(capfd, monkeypatch, arguments, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert app.main(arguments) == 0
    out = capfd.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out and "╭" not in out


def test_a_text_may_be_empty_and_may_look_like_an_empty_value(probe):
    def function(prompt: str = "x", stop: str = "x") -> None:
        print(repr([prompt, stop]))

    assert probe(function, "--prompt", "", "--stop", "--prompt=") == (0, "['', '--prompt=']\n", "")


def test_a_failure_is_its_message_and_its_hint(probe):
    assert probe(raising(Mamba2Error("conv: expected 4, got 5"))) == (
        1,
        "",
        "error: conv: expected 4, got 5\n",
    )
    assert probe(raising(Mamba2Error("no file", "fetch it"))) == (1, "", "error: no file\nhint: fetch it\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("first line\nsecond line"), "error: RuntimeError: first line"),
        (AssertionError(), "error: AssertionError"),
    ],
)
def test_an_unexpected_failure_is_one_line_and_how_to_see_more(probe, error, line):
    assert probe(raising(error)) == (1, "", f"{line}\nhint: set MAMBA2_DEBUG=1 for the traceback\n")


def test_a_package_that_does_not_import_leads_to_doctor(probe):
    expected = "error: ImportError: no such symbol\nhint: mamba2 doctor says which packages work; set "
    assert probe(raising(ImportError("no such symbol")))[2].startswith(expected)


def test_a_lack_of_memory_says_what_takes_less(probe):
    import torch

    hint = "hint: fewer sequences at once, shorter ones, or a narrower --dtype take less\n"
    for error in (MemoryError("no more"), torch.OutOfMemoryError("no more"), MemoryError()):
        line = "error: memory: expected enough of it, got: no more\n"
        assert probe(raising(error)) == (1, "", line + hint)
    status, out, err = probe(lambda: torch.empty(2**60, dtype=torch.uint8) and None)
    assert (status, out) == (1, "")
    assert err.startswith("error: memory: expected enough of it, got: can't allocate ") and err.endswith(hint)


def test_a_failure_of_the_file_system_names_the_file(probe):
    assert probe(lambda: open("no/such/file") and None) == (
        1,
        "",
        "error: no/such/file: No such file or directory\n",
    )


@pytest.mark.parametrize("error", [Mamba2Error("what: expected X, got Y"), RuntimeError("x")])
def test_debug_shows_the_traceback_before_the_line(probe, monkeypatch, error):
    monkeypatch.setenv("MAMBA2_DEBUG", "1")
    status, _, err = probe(raising(error))
    assert status == 1
    assert err.startswith("Traceback (most recent call last):")
    assert "\nerror: " in err


def test_a_command_chooses_its_own_status(probe):
    assert probe(raising(typer.Exit(1))) == (1, "", "")


def test_an_interrupt_is_silent_and_130(probe):
    assert probe(raising(KeyboardInterrupt())) == (130, "", "")


def test_control_c_ends_a_running_command_with_130(tmp_path):
    process = start(PROBE.format(body="out.data('begun')\n    import time; time.sleep(60)"))
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, b"", b"")


def test_control_c_ends_an_import_of_torch_that_would_swallow_it(tmp_path):
    (tmp_path / "torch.py").write_text(
        "import time\nprint('begun', flush=True)\ntry:\n    time.sleep(60)\nexcept BaseException:\n    pass\n"
    )
    body = f"sys.path.insert(0, {str(tmp_path)!r})\n    import torch; out.data('not ended')"
    process = start(PROBE.format(body=body))
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, b"", b"")


def test_control_c_before_the_command_line_is_imported_is_silent(tmp_path):
    (tmp_path / "typer.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom mamba_commands.entry import main\n"
    process = start(code + "sys.exit(main())")
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, b"", b"")


def test_interrupts_that_were_ignored_stay_ignored():
    body = "import signal; out.data(signal.getsignal(signal.SIGINT).name)"
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + PROBE.format(body=body)
    assert finish(start(code)) == (0, b"SIG_IGN\n", b"")


def test_a_reader_that_has_enough_is_no_failure():
    process = start(PROBE.format(body=FOREVER))
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(60), err) == (0, b"")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_a_reader_that_was_never_there_is_no_failure(arguments):
    read, write = os.pipe()
    os.close(read)
    process = start(
        f"import sys; from mamba_commands.app import main; sys.exit(main({arguments}))", stdout=write
    )
    os.close(write)
    assert finish(process) == (0, None, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "wb") as full:
        process = start(PROBE.format(body=FOREVER), stdout=full)
    assert finish(process) == (1, None, b"error: standard output: No space left on device\n")


@pytest.mark.skipif(os.name != "posix", reason="closes descriptors by the shell")
@pytest.mark.parametrize("descriptor", [1, 2])
def test_a_closed_stream_is_no_failure(descriptor):
    code = PROBE.format(body="out.data('data'); out.note('note')")
    command = ["sh", "-c", f'exec "$0" -c "$1" {descriptor}>&-', sys.executable, code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert ran.returncode == 0
    assert ran.stdout + ran.stderr == (b"note\n" if descriptor == 1 else b"data\n")


def test_stdout_is_utf_8_in_any_locale():
    process = start(
        PROBE.format(body="out.data('é🙂 \\udcff')"), env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    )
    assert finish(process) == (0, "é🙂 ".encode() + b"\xff\n", b"")


def test_the_toolkits_own_warnings_are_one_line_and_others_are_dropped(probe):
    def function() -> None:
        for module in ("mamba_kernels.backend", "transformers.utils"):
            warnings.warn_explicit("Triton is not used", UserWarning, f"{module}.py", 1, module=module)

    assert probe(function) == (0, "", "warning: Triton is not used\n")


def test_main_leaves_warnings_as_they_were():
    before = warnings.showwarning, list(warnings.filters)
    app.main(["--version"])
    assert before == (warnings.showwarning, list(warnings.filters))


def test_only_the_named_command_is_imported(probe, monkeypatch):
    imported = []
    monkeypatch.setattr(
        app.Command, "load", lambda self: imported.append(self.name) or (lambda: None), raising=True
    )
    app.main(["convert"])
    assert imported == ["convert"]


def test_help_of_every_option_has_a_text():
    for command in app.COMMANDS:
        click_command = typer.main.get_command(app._app(command))
        subcommand = click_command.commands[command.name]
        assert subcommand.help
        for parameter in subcommand.params:
            assert parameter.help, f"{command.name}: {parameter.name}"


def options_by_command() -> dict[str, list]:
    apps = ((command.name, typer.main.get_command(app._app(command))) for command in app.COMMANDS)
    return {name: group.commands[name].params for name, group in apps}


@pytest.mark.parametrize("option", ["--json", "--quiet", "--verbose", "--revision", "--device", "--backend"])
def test_an_option_that_several_commands_have_is_the_same_in_each(option):
    found = [
        (one.opts, one.metavar, one.help, one.default)
        for options in options_by_command().values()
        for one in options
        if option in one.opts
    ]
    assert len(found) > 1 and all(other == found[0] for other in found)


def test_every_option_names_its_value_in_one_word():
    for command, options in options_by_command().items():
        for option in options:
            assert option.metavar or option.is_flag, f"{command} {option.name}"
