"""`mamba2 doctor`: it finds what is broken, says what was not run, and tests every kernel there is."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mamba_cli import doctor, hub, self_test
from mamba_cli.doctor import Device, diagnose
from mamba_cli.self_test import Case
from mamba_commands.app import main
from mamba_kernels import backend

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
WORKING = Case("working", lambda device, dtype: [torch.ones(3)], lambda: [torch.ones(3).double()])
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")


def in_a_process(code: str, tmp_path: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Run Python code in a process of its own, where the interpreter can be on or off."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(tmp_path or ""), *sys.path]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def doctor_in_a_process(*arguments: str, **options) -> subprocess.CompletedProcess:
    return in_a_process(
        f"import sys; from mamba_commands.app import main; sys.exit(main(['doctor', *{arguments}]))",
        **options,
    )


def with_cases(monkeypatch: pytest.MonkeyPatch, *cases: Case) -> None:
    monkeypatch.setattr(self_test, "CASES", cases)


def giving(results: Callable[[], list[torch.Tensor]]) -> Case:
    return dataclasses.replace(WORKING, operation="faulty", run=lambda device, dtype: results())


def raise_error(error: Exception) -> list[torch.Tensor]:
    raise error


@no_gpu
def test_without_a_gpu_all_that_runs_is_sound_and_the_rest_is_said_not_to_be_run(tmp_path):
    # A broken Triton, too, is no fault where no GPU needs it.
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('libtriton is missing')")
    ran = doctor_in_a_process("--json", tmp_path=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    document = json.loads(ran.stdout)
    assert document["broken"] == []
    by_backend = {"torch": set(), "triton": set()}
    for test in document["tests"]:
        by_backend[test["backend"]].add((test["result"], test["used"]))
        if test["backend"] == "triton":
            assert test["detail"] == "no CUDA device"
    assert by_backend == {"torch": {("ok", True)}, "triton": {("not run", False)}}
    (cpu,) = document["devices"]
    assert (cpu["device"], cpu["backend"]) == ("cpu", "torch") and cpu["reason"].startswith("no GPU: ")
    assert document["versions"]["torch"] == torch.__version__
    assert document["hub"]["offline"] is True


@no_gpu
def test_every_triton_kernel_passes_in_the_interpreter_and_none_is_left_out():
    code = """
import json, sys, torch
from mamba_cli.self_test import try_operations
outcomes = [(o.test, o.backend, o.result, o.detail) for o in try_operations(torch.device("cpu"), "torch")]
loaded = [name.partition(".")[2] for name in sys.modules if name.startswith("mamba_kernels.")]
print(json.dumps([outcomes, loaded]))
"""
    ran = in_a_process(code, TRITON_INTERPRET="1")
    outcomes, loaded = json.loads(ran.stdout)
    assert [outcome for outcome in outcomes if outcome[2] != "ok"] == []
    assert {backend for _, backend, _, _ in outcomes} == {"torch", "triton"}
    kernels = {file.stem for file in (ROOT / "kernels" / "mamba_kernels").glob("*_triton.py")}
    assert kernels - set(loaded) == set(), "give each a case in mamba_cli/self_test_cases.py"


@pytest.mark.gpu
def test_everything_works_on_a_gpu():
    found = diagnose()
    assert found.broken == []
    assert {test.result for test in found.tests} == {"ok"}
    assert found.devices[0].backend == "triton"


@pytest.mark.parametrize(
    ("results", "detail"),
    [
        (lambda: [torch.ones(3) * 1.01], "relative error: expected at most 1e-03, got 1.0e-02"),
        (lambda: [torch.full((3,), torch.nan)], "relative error: expected at most 1e-03, got nan"),
        (lambda: [torch.ones(4)], "result: expected shape (3,), got (4,)"),
        (lambda: raise_error(RuntimeError("no ptxas\nand more")), "RuntimeError: no ptxas"),
    ],
)
def test_a_kernel_that_is_wrong_or_fails_is_broken_and_the_status_is_1(capfd, monkeypatch, results, detail):
    with_cases(monkeypatch, WORKING, giving(results))
    monkeypatch.setattr(self_test, "why_not_triton", lambda device: "no CUDA device")
    assert main(["doctor", "--json"]) == 1
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert document["broken"] == [f"faulty on {document['devices'][0]['device']} (torch): {detail}"]
    assert err == "error: installation: expected nothing broken, got 1 broken part\n"
    results_of = {(test["test"], test["backend"]): test["result"] for test in document["tests"]}
    assert results_of["working", "torch"] == "ok" and results_of["faulty", "torch"] == "broken"
    assert results_of["faulty", "triton"] == "not run"


def test_a_sound_installation_is_said_to_be_one_in_one_line(capfd, monkeypatch):
    with_cases(monkeypatch, WORKING)
    monkeypatch.setattr(self_test, "why_not_triton", lambda device: "no CUDA device")
    assert main(["doctor"]) == 0
    out, err = capfd.readouterr()
    rows = [line.split("\t") for line in out.split("\n\n")[3].splitlines()[1:]]
    passed = sum(row[4] == "ok" for row in rows)
    assert err == f"nothing is broken: {passed} tests passed, {len(rows) - passed} cannot run here\n"
    assert main(["doctor", "-q"]) == 0
    assert capfd.readouterr().err == ""


def test_verbose_shows_where_a_kernel_failed(capfd, monkeypatch):
    with_cases(monkeypatch, giving(lambda: raise_error(RuntimeError("no ptxas"))))
    assert main(["doctor"]) == 1
    assert "Traceback" not in capfd.readouterr().err
    assert main(["doctor", "--verbose"]) == 1
    out, err = capfd.readouterr()
    assert "Traceback" in err and "in raise_error" in err and "Traceback" not in out


def test_a_triton_that_cannot_serve_a_gpu_is_broken(capfd, monkeypatch):
    with_cases(monkeypatch)
    reason = "cannot import triton (ImportError: libtriton is missing)"
    gpu = Device("cuda:0", "NVIDIA H200", "139 GiB", "torch", reason)
    devices = doctor.find_devices()
    monkeypatch.setattr(doctor, "find_devices", lambda: [gpu, *devices])
    monkeypatch.setattr(doctor, "run_tests", lambda devices: [])
    assert main(["doctor"]) == 1
    out, err = capfd.readouterr()
    assert out.endswith(f"\nbroken\ntriton: expected it to serve cuda:0, got: {reason}\n")
    assert err == "error: installation: expected nothing broken, got 1 broken part\n"


def test_a_gpu_that_triton_serves_is_not_broken(monkeypatch):
    with_cases(monkeypatch)
    gpu = Device("cuda:0", "NVIDIA H200", "139 GiB", "triton", "")
    monkeypatch.setattr(doctor, "find_devices", lambda: [gpu])
    monkeypatch.setattr(doctor, "run_tests", lambda devices: [])
    assert diagnose().broken == []


def test_why_triton_cannot_run_is_its_own_error(monkeypatch):
    reason = "cannot import triton (ImportError: boom)"
    monkeypatch.setattr(self_test, "triton_problem", lambda: reason)
    for device in (CPU, torch.device("cuda")):
        monkeypatch.setattr(self_test, "interpreting", lambda: True)
        assert self_test.why_not_triton(device) == reason


def test_a_torch_that_cannot_be_imported_is_found(capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capfd.readouterr().out)
    (problem,) = document["broken"]
    assert problem.startswith("torch: cannot import it (ModuleNotFoundError: ")
    assert document["tests"] == [] and document["versions"]["python"]


@pytest.mark.parametrize(("package", "tests_run"), [("safetensors", False), ("transformers", True)])
def test_a_package_that_cannot_be_imported_is_found_whether_the_tests_need_it_or_not(
    tmp_path, package, tests_run
):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(r"raise ImportError('built for another Python\nTry pip')")
    ran = doctor_in_a_process("--json", tmp_path=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr == "error: installation: expected nothing broken, got 1 broken part\n"
    document = json.loads(ran.stdout)
    assert document["broken"] == [f"{package}: cannot import it (ImportError: built for another Python)"]
    assert bool(document["tests"]) == tests_run


def test_a_cache_that_cannot_be_read_is_not_taken_for_a_package_that_cannot_be_imported(monkeypatch):
    with_cases(monkeypatch)

    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "/hub/token")

    monkeypatch.setattr(doctor, "find_hub", refuse)
    found = diagnose()
    assert found.hub is None and found.tests
    assert found.broken == [
        "hub: expected to read its cache and token, got PermissionError: [Errno 13] Permission denied: "
        "'/hub/token'"
    ]


def test_a_triton_that_fails_where_its_interpreter_was_asked_for_is_broken(monkeypatch):
    with_cases(monkeypatch)
    monkeypatch.setattr(doctor, "find_devices", lambda: [Device("cpu", "", "", "torch", "")])
    reason = "cannot import triton (ImportError: boom)"
    monkeypatch.setattr(backend, "triton_problem", lambda: reason)
    for asked, installed, broken in ((True, "3.9.0", 1), (False, "3.9.0", 0), (True, None, 0)):
        found = doctor.versions() | {"triton": installed}
        monkeypatch.setattr(doctor, "versions", lambda found=found: found)
        monkeypatch.setattr(backend, "interpreting", lambda asked=asked: asked)
        expected = [f"triton: expected it to serve its interpreter, got: {reason}"]
        assert diagnose().broken == expected * broken


def test_a_missing_package_is_broken_where_it_is_needed(monkeypatch):
    with_cases(monkeypatch)
    found = dict.fromkeys(doctor.versions(), "1.0") | {"safetensors": None, "matplotlib": None}
    monkeypatch.setattr(doctor, "versions", lambda: found)
    assert diagnose().broken == ["safetensors: expected it installed, got none"]


def test_an_embedded_model_that_is_not_there_is_broken(monkeypatch, tmp_path):
    with_cases(monkeypatch)
    monkeypatch.setattr(hub, "embedded_model_path", lambda: tmp_path)
    *_, outcome = diagnose().tests
    assert (outcome.test, outcome.result) == ("embedded model", "broken")


def test_a_device_that_writes_another_text_than_the_cpu_is_broken(monkeypatch):
    with_cases(monkeypatch)
    (cpu,) = [device for device in doctor.find_devices() if device.device == "cpu"]
    gpu = Device("cuda:0", "", "", "triton", "")
    monkeypatch.setattr(doctor, "_continue_text", lambda device: " a fox" if device == "cpu" else " a box")
    outcomes = {test.device: test for test in doctor.run_tests([gpu, cpu])}
    assert (outcomes["cpu"].result, outcomes["cpu"].detail) == ("ok", "wrote ' a fox'")
    assert outcomes["cuda:0"].result == "broken"
    assert outcomes["cuda:0"].detail == "text: expected ' a fox' as on the CPU, got ' a box'"


def test_the_hubs_cache_is_described_and_its_token_is_not(capfd, monkeypatch, tmp_path):
    with_cases(monkeypatch)
    from huggingface_hub import constants

    for folder in ("models--a--b", "models--c--d", "datasets--e--f"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "hf_not_to_be_shown")
    assert main(["doctor", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["hub"] == {
        "cache": str(tmp_path),
        "models": 2,
        "offline": True,
        "endpoint": constants.ENDPOINT,
        "token": True,
    }
    assert "hf_not_to_be_shown" not in out + err


def test_nothing_is_fetched(monkeypatch):
    import socket

    with_cases(monkeypatch)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("reached for a network"))
    assert diagnose().broken == []


def test_tables_are_tab_separated_when_piped(capfd, monkeypatch):
    with_cases(monkeypatch, WORKING)
    assert main(["doctor"]) == 0
    packages, devices, cache, tests = capfd.readouterr().out.split("\n\n")
    for table, columns in ((packages, 2), (devices, 5), (cache, 2), (tests, 6)):
        assert {len(line.split("\t")) for line in table.strip().splitlines()} == {columns}
    assert "working\t" in tests and "embedded model\t" in tests
