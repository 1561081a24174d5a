"""choose_token: the kernel and torch against a float64 oracle, ties, extremes, and what else is written."""

import itertools
import math

import pytest
import torch

from mamba_cli.decoding import STEPS_DRAWN, Chooser
from mamba_cli.sampling import SamplingParams, UniformNumbers
from mamba_kernels.backend import use_backend
from mamba_kernels.choose_token import choose_token, choose_token_ref

BACKENDS = ["torch", "triton"]
# Several blocks of few lanes, so that small vocabularies take every path.
SMALL = {"BLOCK": 256, "UNROLL": 2, "num_warps": 1}
# Relative errors of float32 weights and sums stay below.
ROUNDING = 1e-5
LAST = math.nextafter(1.0, 0.0)


def choose(logits: torch.Tensor, backend: str, vocab_size: int | None = None, **options) -> list[int]:
    """The choices of choose_token, without its other effects."""
    batch, device = logits.shape[0], logits.device
    token_ids, turn = torch.full((batch,), -1, device=device), torch.zeros(batch, dtype=torch.long).to(device)
    if "uniform" in options:
        options["uniform"] = options["uniform"].to(device).reshape(1, batch).contiguous()
    if "seen" in options:
        options["seen"] = options["seen"].clone()
    if backend == "triton":
        options.setdefault("config", SMALL)
    with use_backend(backend):
        choose_token(logits, token_ids, vocab_size=vocab_size or logits.shape[1], turn=turn, **options)
    return token_ids.tolist()


def exact(logits: torch.Tensor, number: float, penalty, seen, temperature, top_k, top_p, min_p) -> int:
    """The choice for one row of logits, in float64 and by sorting."""
    x = logits.double()
    if seen is not None:
        x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
    weights = ((x - x.max()) / temperature).exp()
    falling = weights.sort(descending=True).values[: top_k or None]
    cumulative = falling.cumsum(0)
    within = falling[cumulative - falling < top_p * cumulative[-1]] if top_p < 1 else falling
    least = max(within.min() if len(within) else falling[0], min_p)
    cumulative = weights.where(weights >= least, 0).cumsum(0)
    return int((cumulative <= number * cumulative[-1]).sum())


def assert_chosen_exactly(
    chosen: list[int], logits: torch.Tensor, vocab_size: int, uniform: torch.Tensor, seen=None, **options
) -> None:
    """Assert that each choice is the exact one, or one that rounding of numbers and thresholds leads to."""
    values = {"repetition_penalty": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    clear = 0
    for row, token in enumerate(chosen):
        possible = set()
        # The factors come in one by one, as each costs a sort: most rows stop at the first.
        for u, p, m in sorted(itertools.product((0, -1, 1), repeat=3), key=lambda step: sum(map(abs, step))):
            possible.add(
                exact(
                    logits[row, :vocab_size].cpu(),
                    min(LAST, float(uniform[row]) * (1 + u * ROUNDING)),
                    values["repetition_penalty"],
                    None if seen is None else seen[row, :vocab_size].cpu(),
                    values["temperature"],
                    values["top_k"],
                    values["top_p"] if values["top_p"] == 1 else values["top_p"] * (1 + p * ROUNDING),
                    values["min_p"] * (1 + m * ROUNDING),
                )
            )
            if token in possible:
                clear += (u, p, m) == (0, 0, 0)
                break
        assert token in possible, f"row {row}: expected one of {possible}, got {token}"
    assert clear >= 0.9 * len(chosen)


OPTIONS = [
    dict(temperature=1.0),
    dict(temperature=0.8, top_k=50, top_p=0.95),
    dict(temperature=0.8, top_k=50),
    dict(temperature=0.8, top_k=1),
    dict(temperature=1.5, top_k=200, top_p=0.9, min_p=0.02),
    dict(temperature=1.0, top_k=400, top_p=0.5),
    dict(temperature=0.8, top_p=0.95),
    dict(temperature=3.0, top_p=0.3, min_p=0.1),
    dict(temperature=0.7, min_p=0.05),
    dict(temperature=1e-6, top_k=50, top_p=0.95),
    dict(temperature=1e29, top_k=50, top_p=0.9),
    dict(temperature=0.9, top_k=40, top_p=0.9, repetition_penalty=1.3),
    dict(temperature=0.9, top_p=0.9, repetition_penalty=0.8),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_choice_is_the_exact_one(device, backend, options):
    torch.manual_seed(0)
    vocab_size, columns = 997, 1008
    logits = torch.randn(9, columns) * torch.tensor([0.5, 1, 2, 3, 3, 3, 5, 8, 20])[:, None]
    logits[:, vocab_size:] = 100.0
    seen = torch.rand(9, columns) < 0.2
    uniform = torch.rand(9, dtype=torch.float64)
    uniform[3:5] = torch.tensor([0.0, LAST], dtype=torch.float64)
    for rows, dtype in ((slice(0, 5), torch.float32), (slice(5, 9), torch.bfloat16)):
        x, of_rows = logits[rows].to(device, dtype), uniform[rows]
        chosen = choose(x, backend, vocab_size, uniform=of_rows, seen=seen[rows].to(device), **options)
        assert_chosen_exactly(chosen, x, vocab_size, of_rows, seen[rows], **options)


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[6]], ids=str)
@pytest.mark.parametrize("batch", [1, 64])
def test_the_choice_is_the_exact_one_in_the_published_vocabulary(device, batch, options):
    torch.manual_seed(batch)
    logits = (torch.randn(batch, 50288) * 2.5).bfloat16().to(device)
    logits[:, 50277:] = 100.0
    uniform = torch.rand(batch, dtype=torch.float64)
    if device.type == "cpu":  # the interpreter takes a second a row
        logits, uniform = logits[::32], uniform[::32]
    chosen = choose(logits, "triton", 50277, uniform=uniform, config=None, **options)
    assert_chosen_exactly(chosen, logits, 50277, uniform, **options)


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[5], OPTIONS[6], OPTIONS[7]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits_are_kept_or_dropped_together(device, backend, options):
    torch.manual_seed(0)
    logits = torch.randn(3, 500) * 2
    logits = torch.stack([logits.round(), (logits * 2).round() / 2, torch.zeros_like(logits)], 1).flatten(
        0, 1
    )
    uniform = torch.rand(9, dtype=torch.float64)
    chosen = choose(logits.to(device), backend, uniform=uniform, **options)
    assert_chosen_exactly(chosen, logits, 500, uniform, **options)


@pytest.mark.parametrize("options", OPTIONS[:10], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_logit_of_minus_infinity_is_never_chosen(device, backend, options):
    torch.manual_seed(0)
    logits = torch.full((6, 300), -math.inf)
    for row, count in enumerate((1, 2, 20, 49, 60, 299)):
        logits[row, torch.randperm(300)[:count]] = torch.randn(count)
    uniform = torch.tensor([0.0, LAST, 0.3, 0.6, LAST, 0.0], dtype=torch.float64)
    chosen = choose(logits.to(device), backend, uniform=uniform, **options)
    assert_chosen_exactly(chosen, logits, 300, uniform, **options)
    assert all(logits[row, token] > -math.inf for row, token in enumerate(chosen))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1], OPTIONS[6]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_finite_largest_logit_get_token_0_and_leave_the_others_alone(device, backend, options):
    torch.manual_seed(0)
    logits = torch.randn(5, 200)
    logits[0, 3], logits[1], logits[2, 7] = math.nan, -math.inf, math.inf
    uniform = torch.full((5,), 0.7, dtype=torch.float64)
    chosen = choose(logits.to(device), backend, uniform=uniform, **options)
    assert chosen[:3] == [0, 0, 0]
    assert chosen[3:] == choose(logits[3:].to(device), backend, uniform=uniform[3:], **options)
    assert_chosen_exactly(chosen[3:], logits[3:], 200, uniform[3:], **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_greedy_choice_is_the_first_of_the_largest(device, backend, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(6, 400) * 3).to(dtype)
    logits[0, [399, 17, 250]] = 50.0
    logits[1] = -math.inf
    logits[2] = -1.0
    logits[2, [5, 9]] = torch.tensor([-0.0, 0.0], dtype=dtype)
    logits[3, [70, 300]] = math.inf
    logits[4, [390, 65, 66]] = torch.tensor([math.nan, math.nan, math.inf], dtype=dtype)
    chosen = choose(logits.to(device), backend)
    assert chosen == logits.argmax(-1).tolist()
    assert chosen[:5] == [17, 0, 5, 70, 65]


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_not_looked_at_and_any_stride_of_rows_will_do(device, backend):
    torch.manual_seed(0)
    for vocab_size, columns, stride in ((61, 61, 61), (61, 64, 101), (130, 136, 152)):
        rows = torch.full((4, stride), math.nan)
        rows[:, :vocab_size] = torch.randn(4, vocab_size)
        logits = rows.to(device)[:, :columns]
        assert choose(logits, backend, vocab_size) == logits[:, :vocab_size].argmax(-1).tolist()
        uniform = torch.rand(4, dtype=torch.float64)
        options = dict(temperature=1.0, top_k=20, top_p=0.9)
        chosen = choose(logits, backend, vocab_size, uniform=uniform, **options)
        assert_chosen_exactly(chosen, logits, vocab_size, uniform, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens(device, backend):
    logits = torch.tensor([[2.0, 1.9, -1.0], [-1.0, -1.1, -5.0]], device=device)
    seen = torch.tensor([[True, False, False], [True, False, False]], device=device)
    assert choose(logits, backend, seen=seen, repetition_penalty=1.2) == [1, 1]
    assert choose(logits, backend, seen=~seen, repetition_penalty=1.2) == [0, 0]
    assert choose(logits, backend, seen=seen) == [0, 0]


def test_comparing_pairs_and_searching_the_row_choose_the_same(device):
    torch.manual_seed(0)
    logits = (torch.randn(6, 700) * 3).to(device)
    uniform = torch.rand(6, dtype=torch.float64)
    options = dict(temperature=0.9, top_k=60, top_p=0.9, min_p=0.01)
    by_pairs = choose(logits, "triton", uniform=uniform, **options)
    by_search = choose(logits, "triton", uniform=uniform, config=SMALL | {"ROOM": 0}, **options)
    assert by_pairs == by_search


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_choice_is_counted_remembered_and_seen(device, backend):
    torch.manual_seed(0)
    logits = torch.randn(3, 64, device=device)
    uniform = torch.rand(6, 3, dtype=torch.float64, device=device)
    turn = torch.tensor([0, 4, 5], device=device)
    token_ids = torch.zeros(3, dtype=torch.long, device=device)
    history = torch.full((4, 3), -1, device=device)
    seen = torch.zeros(3, 64, dtype=torch.bool, device=device)
    with use_backend(backend):
        choose_token(
            logits, token_ids, vocab_size=60, turn=turn, temperature=1.0, top_k=30, uniform=uniform,
            seen=seen, history=history,
        )  # fmt: skip
    numbers = torch.stack([uniform[0, 0], uniform[4, 1], uniform[5, 2]])
    expected = choose_token_ref(logits, vocab_size=60, temperature=1.0, top_k=30, uniform=numbers)
    assert torch.equal(token_ids, expected)
    assert turn.tolist() == [1, 5, 6]
    assert seen.nonzero().tolist() == [[row, token] for row, token in enumerate(expected.tolist())]
    slots = torch.full((4, 3), -1)
    slots[[0, 0, 1], [0, 1, 2]] = expected.cpu()
    assert torch.equal(history.cpu(), slots)


def test_wrong_arguments_are_refused_by_name(device):
    logits = torch.zeros(2, 8, device=device)
    good = dict(
        token_ids=torch.zeros(2, dtype=torch.long, device=device), vocab_size=8,
        turn=torch.zeros(2, dtype=torch.long, device=device),
    )  # fmt: skip
    for changed, message in (
        ({"vocab_size": 9}, "vocab_size: expected from 1 to 8, got 9"),
        ({"temperature": 1e-12}, "temperature: expected 0 or at least 1e-9"),
        ({"temperature": 1.0}, "uniform: expected numbers"),
        ({"token_ids": torch.zeros(2, device=device)}, "token_ids: expected torch.int64"),
        ({"turn": torch.zeros(3, dtype=torch.long, device=device)}, "turn: expected shape"),
        ({"seen": torch.zeros(2, 7, dtype=torch.bool, device=device)}, "seen: expected shape"),
        ({"history": torch.zeros(4, 3, dtype=torch.long, device=device)}, "history: expected shape"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            choose_token(logits, **good | changed)


@pytest.mark.gpu
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(repetition_penalty=1.2)])
def test_captured_choices_are_those_made_one_by_one(params):
    from mamba_cli.step_graph import capture

    device, steps = torch.device("cuda"), 2 * STEPS_DRAWN
    torch.manual_seed(0)
    rows = torch.randn(steps, 3, 512, device=device) * 3
    logits = torch.zeros(3, 512, device=device)
    choosers = [Chooser(params, 500, 512, 3, device) for _ in range(2)]
    graph = capture(lambda: choosers[0].choose(logits, pdl=True), device)
    numbers = [UniformNumbers(0, 3) for _ in choosers]
    for chooser in choosers:
        chooser.start([1, 2, 3])
    for step in range(steps):
        logits.copy_(rows[step])
        if step % STEPS_DRAWN == 0:
            for chooser, stream in zip(choosers, numbers, strict=True):
                chooser.draw(stream)
        graph.replay()
        choosers[1].choose(logits)
        assert torch.equal(choosers[0].token_ids, choosers[1].token_ids)
    for mine, other in zip(choosers[0].tensors(), choosers[1].tensors(), strict=True):
        assert torch.equal(mine, other)
