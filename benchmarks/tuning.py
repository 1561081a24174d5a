"""What the tuning scripts of decoding share: candidates tried in parallel processes, and a graph's time.

Imported before Triton, so that a machine without a GPU runs the kernels in Triton's interpreter.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

Config = dict[str, Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Enough to compile on, leaving a processor for what waits.
WORKERS = max(1, (os.cpu_count() or 1) - 2)


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """RMS of the difference over that of the reference."""
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


def problems(check: Callable[[Any], str | None], jobs: list[Any], workers: int = WORKERS) -> list[str | None]:
    """What check(job) finds wrong with each job, None where nothing; an exception is a finding too.

    On a GPU in processes of their own, which leave what they compiled in Triton's cache; one that dies takes
    the jobs after it along.
    """
    if DEVICE == "cpu":
        return [_problem(check, job) for job in jobs]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(_problem, check, job) for job in jobs]
    crashes = [job.exception() for job in running]
    return [
        job.result() if crash is None else f"{type(crash).__name__}: {crash}"
        for job, crash in zip(running, crashes, strict=True)
    ]


def _problem(check: Callable[[Any], str | None], job: Any) -> str | None:
    try:
        return check(job)
    except Exception as error:  # a compiler, out of memory: the sweep goes on
        return f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:300]


def milliseconds(work: Callable[[], None], budget: float = 0.04) -> float:
    """The time of `work`, as the best of several replays of a CUDA graph; budget in seconds."""
    work()
    if DEVICE == "cpu":
        begin = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - begin)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(times: int) -> float:
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / times

    once = timed(2)
    times = max(1, min(50, int(budget * 1e3 / 3 / once)))
    return min(timed(times) for _ in range(3))


def about() -> dict[str, str]:
    """The device and the version of torch, for a report."""
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu, interpreter"
    return {"device": name, "torch": torch.__version__}


def short(config: Config | None) -> str:
    return "default" if config is None else " ".join(f"{k}={v}" for k, v in config.items())
