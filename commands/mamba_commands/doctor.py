"""`mamba2 doctor`: what this installation is made of, and whether all of it works."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from mamba_cli.errors import Mamba2Error
from mamba_commands.options import JsonOption, QuietOption, VerboseOption
from mamba_commands.output import Output

if TYPE_CHECKING:
    from mamba_cli.doctor import Diagnosis


def doctor(json: JsonOption = False, quiet: QuietOption = False, verbose: VerboseOption = False) -> None:
    """Show versions, devices, the hub's cache, and test every kernel and the embedded model.

    Each operation runs at a tiny shape, on torch operations and on Triton, and is compared with its
    reference in float64. `used` is the backend it runs on by default here; where that is not the faster
    one, the other's line says why. Nothing is fetched, and what cannot run here is said to be not run.

    Without a GPU, TRITON_INTERPRET=1 runs the Triton kernels in Triton's interpreter. On a GPU the
    first run compiles them, which takes longer than the tests. --verbose adds the tracebacks of what
    failed. The exit status is 1 where something is broken.
    """
    from mamba_cli.doctor import diagnose

    out = Output(quiet=quiet, verbose=verbose)
    with out.progress(None, "testing") as advance:
        diagnosis = diagnose(advance)
    if json:
        out.json(asdict(diagnosis))
    else:
        _print(diagnosis, out)
    for test in diagnosis.tests:
        if test.traceback:
            out.detail(f"{test.test} on {test.device} ({test.backend}):\n{test.traceback}")
    if diagnosis.broken:
        count = len(diagnosis.broken)
        parts = f"{count} broken part{'s' * (count > 1)}"
        raise Mamba2Error(f"installation: expected nothing broken, got {parts}")


def _print(diagnosis: "Diagnosis", out: Output) -> None:
    out.table(("package", "version"), [(name, found or "none") for name, found in diagnosis.versions.items()])
    if diagnosis.devices:
        out.data("")
        out.table(
            ("device", "name", "details", "backend", "why not faster"),
            [tuple(asdict(device).values()) for device in diagnosis.devices],
        )
    if diagnosis.hub:
        out.data("")
        facts = asdict(diagnosis.hub).items()
        out.table(("hub", "value"), [(name, _word(value)) for name, value in facts])
    if diagnosis.tests:
        out.data("")
        out.table(
            ("test", "device", "backend", "used", "result", "detail"),
            [
                (test.test, test.device, test.backend, _word(test.used), test.result, test.detail)
                for test in diagnosis.tests
            ],
        )
    if diagnosis.broken:
        out.data("")
        out.table(("broken",), [(line,) for line in diagnosis.broken])
    else:
        passed = sum(test.result == "ok" for test in diagnosis.tests)
        others = f", {idle} cannot run here" if (idle := len(diagnosis.tests) - passed) else ""
        out.note(f"nothing is broken: {passed} tests passed{others}")


def _word(value: object) -> object:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
