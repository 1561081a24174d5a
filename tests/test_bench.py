"""What a benchmark counts, and that it times what it says."""

import platform
import statistics
import sys

import pytest
import torch

from mamba_cli import bench, ceilings, machine, shapes
from mamba_cli.bench import Measurement, count_runs, measure, published_model
from mamba_cli.ceilings import Ceilings, measure_ceilings
from mamba_cli.errors import Mamba2Error
from mamba_cli.language_model import LanguageModel
from mamba_cli.linear import Linear
from mamba_cli.shapes import published_config
from mamba_cli.weights import Weights, random_tensors
from mamba_cli.work import Work, WorkCounter
from model_testing import BASE, VARIANTS, make, variant

MAMBA1 = variant(layer="Mamba1", headdim=1, ngroups=1, dt_rank=4, rmsnorm=False, d_ssm=64)
CONFIGS = VARIANTS | {"mamba1": MAMBA1}
CPU = torch.device("cpu")
H200 = 4274e9, 680e12  # bytes and operations a second that the project's bounds were computed with


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_reads_every_byte_that_a_model_holds(monkeypatch, name, dtype):
    config = CONFIGS[name]
    sizes = {}
    original = Weights.__call__

    def record(self: Weights, name: str) -> torch.Tensor:
        tensor = original(self, name)
        sizes[self._prefix + name] = tensor.nbytes
        return tensor

    monkeypatch.setattr(Weights, "__call__", record)
    tensors = random_tensors(config)
    LanguageModel(config, Weights(tensors.__getitem__, set(tensors), CPU, dtype))
    if not config.tie_embeddings:
        del sizes["backbone.embedding.weight"]  # a step looks up a row of it
    assert WorkCounter(config, dtype).weight_bytes == sum(sizes.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_reads_and_writes_the_state(name):
    lm = make(CONFIGS[name])
    work = WorkCounter(lm.config, lm.dtype)
    one, two = work.decode(1, 0, 1), work.decode(2, 0, 1)
    keys_read_and_written = 2 * work.position_bytes
    assert two.nbytes - one.nbytes == 2 * lm.init_state(1).nbytes + keys_read_and_written


def test_a_narrower_state_is_counted_as_it_is_kept():
    wide, narrow = WorkCounter(BASE, torch.float32), WorkCounter(BASE, torch.float32, torch.bfloat16)
    assert wide.state_bytes - narrow.state_bytes == 2 * BASE.n_layer * BASE.d_ssm * BASE.d_state


def test_a_step_reads_a_packed_state_and_writes_what_its_window_is_folded_into():
    lm = make(BASE).with_state("int8:nearest:4")
    work = WorkCounter(lm.config, lm.dtype, state_format=lm.state_format)
    state = lm.init_state(1)
    conv = sum(layer.conv.nbytes for layer in state.layers)
    assert work.state_bytes == state.nbytes
    assert work.step_bytes == 2 * conv + 1.25 * (state.nbytes - conv)


@pytest.mark.parametrize(
    "name", ["plain", "groups_as_heads", "part_of_the_width_is_ssm", "mlp", "untied", "mamba1"]
)
def test_a_step_is_its_linear_layers_its_convolution_and_its_recurrence(monkeypatch, name):
    lm, batch, products = make(CONFIGS[name]), 3, []
    config, original = lm.config, Linear.__call__

    def record(self: Linear, x: torch.Tensor) -> torch.Tensor:
        products.append(2 * self.rows * x.numel())
        return original(self, x)

    monkeypatch.setattr(Linear, "__call__", record)
    lm.step(torch.zeros(batch, dtype=torch.long), lm.init_state(batch))
    by_element = 2 * config.conv_dim * config.d_conv + 5 * config.d_ssm * config.d_state
    work = WorkCounter(config, lm.dtype).decode(batch, 0, 1)
    assert work.operations == sum(products) + batch * config.n_layer * by_element


def test_a_prompt_passes_the_head_once():
    work = WorkCounter(BASE, torch.float32)
    decoded = work.decode(2, 0, 7).operations
    assert decoded - work.prefill(2, 7).operations == 2 * 6 * 2 * BASE.vocab_rows * BASE.d_model


def test_each_key_seen_by_attention_counts():
    config = VARIANTS["hybrid"]
    work, heads = WorkCounter(config, torch.float32), config.attention
    one = work.decode(1, 5, 1)
    assert one.operations - work.decode(1, 4, 1).operations == 4 * heads.num_heads * heads.head_dim
    assert one.nbytes - work.decode(1, 4, 1).nbytes == 2 * heads.num_heads_kv * heads.head_dim * 4


@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_the_work_of_steps_adds_up(name):
    work = WorkCounter(VARIANTS[name], torch.bfloat16)
    parts = work.decode(2, 3, 4), work.decode(2, 7, 5)
    assert work.decode(2, 3, 9) == Work(*map(sum, zip(*parts, strict=True)))


@pytest.mark.parametrize(
    ("shape", "batch", "ssm_dtype", "milliseconds"),
    [("2.7b", 1, None, 1.34), ("2.7b", 64, torch.bfloat16, 3.8)],
)
def test_bounds_of_decoding_are_those_of_the_published_shapes(shape, batch, ssm_dtype, milliseconds):
    work = WorkCounter(published_config(shape), torch.bfloat16, ssm_dtype).decode(batch, 0, 1)
    assert 1e3 * work.nbytes / H200[0] == pytest.approx(milliseconds, rel=0.03)


def test_the_bound_of_prefill_is_that_of_the_published_shape():
    work = WorkCounter(published_config("2.7b"), torch.bfloat16).prefill(1, 8192)
    assert 8192 / (work.operations / H200[1]) == pytest.approx(126e3, rel=0.03)


def test_ceilings_count_bytes_both_ways_and_two_operations_a_product(monkeypatch):
    monkeypatch.setattr(ceilings, "_seconds", lambda run, device: run() is None or 0.5)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 16)
    found = measure_ceilings(CPU, torch.bfloat16)
    assert found.bytes_per_second == 2 * 2**20 / 0.5
    assert found.operations_per_second == 2 * 16**3 / 0.5
    assert found.method == "measured: a copy of 1 MiB, a matmul of 16 x 16 in bfloat16"


def test_the_best_run_is_the_ceiling_and_the_warm_up_is_not(monkeypatch):
    clock = iter([0, 1, 10, 19, 20, 28, 30, 37, 40, 45, 50, 56])  # runs of 1 (warm-up), 9, 8, 7, 5, 6
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(clock))
    assert ceilings._seconds(lambda: None, CPU) == 5


def test_the_ceiling_of_float16_on_a_cpu_is_measured_in_seconds_not_minutes(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        ceilings, "_matmul_seconds", lambda size, device, dtype: sizes.append((size, dtype)) or size**3
    )
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 2**20)
    for dtype in (torch.float32, torch.float16):
        found = measure_ceilings(CPU, dtype)
    assert sizes == [(2048, torch.float32), (512, torch.float16), (2048, torch.float32)]
    assert "512 x 512 in float16" in found.method


def test_a_cpu_that_is_slow_in_float16_has_its_ceiling_in_float32(monkeypatch):
    seconds = {torch.float16: 100.0, torch.float32: 2.0}
    monkeypatch.setattr(ceilings, "_matmul_seconds", lambda size, device, dtype: seconds[dtype])
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 2**20)
    found = measure_ceilings(CPU, torch.float16)
    assert found.operations_per_second == 2048**3
    assert found.method == "measured: a copy of 1 MiB, a matmul of 2048 x 2048 in float32"


def test_figures_are_means_over_the_repetitions_and_shares_of_the_ceilings():
    run = Measurement("decode", 2, 5, 10, (0.5, 0.25), Work(3_000_000, 6_000_000), 1024)
    rates = [40.0, 80.0]
    assert run.figures(Ceilings(18e6, 72e6, "")) == {
        "phase": "decode",
        "batch_size": 2,
        "prompt_length": 5,
        "generate": 10,
        "tokens_per_second": 60.0,
        "tokens_per_second_deviation": statistics.stdev(rates),
        "milliseconds": pytest.approx(1e3 / 30),  # of a step
        "gb_per_second": pytest.approx(0.009),
        "bandwidth_share": pytest.approx(0.5),
        "tflop_per_second": pytest.approx(18e-6),
        "matmul_share": pytest.approx(0.25),
        "peak_memory_bytes": 1024,
    }


def test_a_prefill_counts_the_prompts_tokens_and_its_milliseconds():
    figures = Measurement("prefill", 3, 8, 0, (0.5,), Work(1, 1), None).figures(Ceilings(1, 1, ""))
    assert (figures["tokens_per_second"], figures["milliseconds"]) == (48.0, 500.0)
    assert figures["tokens_per_second_deviation"] is None and figures["peak_memory_bytes"] is None


def calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[tuple]:
    """Record the arguments of a method that still runs."""
    seen, original = [], getattr(owner, name)

    def spy(*arguments, **options):
        seen.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, spy)
    return seen


def test_every_combination_is_measured_as_often_as_asked():
    advanced = []
    lists = ([1, 2], [3, 9], [0, 4])
    rows = list(measure(make(BASE), *lists, 3, lambda amount, label: advanced.append((amount, label))))
    assert [(row.phase, row.batch_size, row.prompt_length, row.generate) for row in rows] == [
        (phase, batch, prompt, generate)
        for batch in (1, 2)
        for prompt in (3, 9)
        for phase, generate in (("prefill", 0), ("decode", 4))
    ]
    assert all(len(row.seconds) == 3 and min(row.seconds) > 0 for row in rows)
    assert len(advanced) == count_runs(*lists, 3) == 24
    assert advanced[0] == (1, "batch 1, prompt 3")


def test_the_warm_up_runs_once_and_is_discarded(monkeypatch):
    lm = make(BASE)
    prefills = calls(monkeypatch, lm, "prefill")
    (row,) = measure(lm, [2], [5], [0], 3)
    assert [tuple(ids.shape) for (ids,) in prefills] == [(2, 5)] * 4
    assert len(row.seconds) == 3


def test_decode_reads_tokens_from_the_loop_that_generate_uses(monkeypatch):
    lm, taken = make(BASE), []

    def spy(lm, logits, state, params, vocab_size, *rest):
        assert params.greedy and vocab_size == BASE.vocab_size and logits.shape[0] == 2
        for tokens in original(lm, logits, state, params, vocab_size, *rest):
            taken.append(tokens)
            yield tokens

    original = bench.decode
    monkeypatch.setattr(bench, "decode", spy)
    steps = calls(monkeypatch, lm, "step_")
    *_, row = measure(lm, [2], [5], [6], 2)
    runs = 1 + 2
    assert len(taken) == runs * (1 + 6) and len(steps) == runs * 6
    assert taken[:7] == taken[7:14] == taken[14:]  # each run goes on from the same state
    assert row.tokens == 2 * 6


def test_graphs_of_one_measurement_do_not_count_to_the_next(monkeypatch):
    lm = make(BASE)
    released = calls(monkeypatch, lm, "release_graphs")
    assert len(list(measure(lm, [1], [2, 3], [2], 1))) == len(released) == 4


def test_what_does_not_fit_the_memory_is_named(monkeypatch):
    lm, original = make(BASE), LanguageModel.prefill

    def prefill(self, ids, state=None):
        if ids.shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, ids, state)

    monkeypatch.setattr(LanguageModel, "prefill", prefill)
    rows = measure(lm, [1, 4], [3], [0], 1)
    assert next(rows).batch_size == 1
    with pytest.raises(Mamba2Error, match="batch 4, prompt 3: expected it to fit the memory of cpu"):
        next(rows)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the peak")
def test_peak_memory_is_that_since_the_reset():
    machine.reset_peak_memory(CPU)
    before = machine.peak_memory(CPU)
    torch.ones(2**26)  # 256 MiB that are gone again
    peak = machine.peak_memory(CPU)
    assert peak - before > 0.9 * 2**28
    machine.reset_peak_memory(CPU)
    assert machine.peak_memory(CPU) < peak - 0.5 * 2**28


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about the heap of glibc")
def test_what_was_freed_before_does_not_count_to_the_peak_on_a_cpu():
    small = [torch.ones(2**16, dtype=torch.uint8) for _ in range(2**11)]  # from the heap, not a mapping each
    held = machine.peak_memory(CPU)
    del small[:-1]  # the last one stands at the heap's end
    machine.reset_peak_memory(CPU)
    assert machine.peak_memory(CPU) < held - 2**26


def test_a_published_shape_has_random_weights_in_bfloat16_unless_told(monkeypatch):
    monkeypatch.setitem(shapes.PUBLISHED, "130m", (64, 1))
    lm = published_model("130m", "cpu", "auto", "auto")
    assert (lm.name, lm.dtype, lm.config.n_layer) == ("130m with random weights", torch.bfloat16, 1)
    assert published_model("130m", "cpu", "float32", "auto").dtype == torch.float32
    with pytest.raises(Mamba2Error, match="shape: expected one of 130m"):
        published_model("7b", "cpu", "auto", "auto")


@pytest.mark.gpu
def test_the_gpu_runs_what_the_cpu_runs():
    lm = bench.random_model(BASE, "cuda", on_device=True)
    rows = list(measure(lm, [1, 2], [3, 600], [4], 2))
    assert len(rows) == 8 and all(row.peak_memory > 0 for row in rows)
    found = measure_ceilings(lm.device, lm.dtype)
    assert found.bytes_per_second > 0 and found.operations_per_second > 0
