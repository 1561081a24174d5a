"""A measurement as a whole: plans, prefixes, limits, interruption and resumption, the figures of a run."""

import math

import pytest
import torch

from mamba_cli.errors import Mamba2Error
from mamba_cli.perplexity.evaluate import automatic_batch_size, evaluate
from mamba_cli.perplexity.plan import make_plan
from mamba_cli.perplexity.report import measure_by_position, strict, summarise
from mamba_cli.perplexity.tokens import encode_documents, measure_extent, prefix_token
from perplexity_testing import (
    VOCAB,
    NumberTokenizer,
    documents,
    expected_nlls,
    random_stand_in,
    some_ids,
)

TOKENIZER = NumberTokenizer()


def encode(*texts: str, prefix: int | None = None, max_tokens: int | None = None):
    return encode_documents(texts, TOKENIZER, prefix, VOCAB, max_tokens)


def ids_of(encoded) -> list[list[int]]:
    return [document.ids.tolist() for document in encoded]


def test_the_prefix_stands_before_every_document_and_is_never_doubled():
    assert ids_of(encode("3 4", "1 5", "", prefix=1)) == [[1, 3, 4], [1, 5], [1]]
    assert [document.prefixed for document in encode("3 4", "1 5", prefix=1)] == [True, False]


def test_the_prefix_token_is_the_tokenizers():
    assert [prefix_token(TOKENIZER, name) for name in ("none", "bos", "eos")] == [None, 1, 2]
    without = NumberTokenizer()
    without.bos_id = None
    with pytest.raises(Mamba2Error, match="expected a tokenizer with a BOS token"):
        prefix_token(without, "bos")
    # GPT-style: one token for both ends, which the tokenizer names the end alone.
    without.decode = lambda ids: "<|endoftext|>"
    assert prefix_token(without, "bos") == 2


def test_the_token_limit_counts_text_and_cuts_the_last_document():
    encoded = encode("3 4 5", "6 7 8", "9", prefix=1, max_tokens=5)
    assert ids_of(encoded) == [[1, 3, 4, 5], [1, 6, 7]]
    assert [document.text for document in encoded] == ["3 4 5", "6 7"]


def test_ids_past_the_models_vocabulary_are_an_error_with_both_numbers():
    with pytest.raises(Mamba2Error, match=f"expected below the model's vocabulary of {VOCAB}, got 12"):
        encode("3 12 4")


@pytest.mark.parametrize(
    ("texts", "prefix", "predictions"),
    [
        ((), None, None),
        (("",), None, None),
        (("3",), None, None),
        (("",), 1, None),
        (("3",), 1, 1),
        (("3 4",), None, 1),
    ],
)
def test_what_has_nothing_to_predict_is_an_error_and_not_a_number(texts, prefix, predictions):
    if predictions is None:
        with pytest.raises(Mamba2Error, match="expected at least 2 tokens"):
            make_plan(encode(*texts, prefix=prefix), TOKENIZER)
    else:
        assert make_plan(encode(*texts, prefix=prefix), TOKENIZER).predictions == predictions


def test_the_window_limit_cuts_windows_and_in_a_carried_pass_chunks():
    encoded = encode(" ".join(map(str, some_ids(41))), "3 4")
    assert make_plan(encoded, TOKENIZER, "window", 8, 4, max_windows=3).predictions == 16
    carried = make_plan(encoded, TOKENIZER, "carry", 8, max_windows=3)
    assert (carried.predictions, len(carried.windows), carried.blocks) == (24, 1, [8, 8, 8])
    assert len(carried.documents[0].ids) == 25


def test_a_carried_pass_refuses_a_stride():
    with pytest.raises(Mamba2Error, match="stride: expected none in mode carry"):
        make_plan(encode("3 4 5"), TOKENIZER, "carry", 8, 4)


def test_bytes_are_those_of_predicted_tokens_and_words_those_of_the_text():
    extent = measure_extent(encode("3 4 10", "5"), TOKENIZER)
    assert (extent.tokens, extent.bytes, extent.words) == (4, len(" 4 10"), 4)
    assert measure_extent(encode("3 4 10", prefix=1), TOKENIZER).bytes == len("3 4 10")


def test_the_figures_scale_before_they_are_exponentiated():
    encoded = encode(" ".join(map(str, some_ids(60))), prefix=1)
    plan = make_plan(encoded, TOKENIZER, "window", 16)
    figures = summarise(
        evaluate(random_stand_in(), plan), plan, extent := measure_extent(plan.documents, TOKENIZER)
    )
    nlls = expected_nlls(random_stand_in(), [1, *some_ids(60)], 16, 16)
    assert figures.tokens == 60
    assert figures.nll_sum == pytest.approx(sum(nlls), rel=1e-6)
    assert figures.perplexity == pytest.approx(math.exp(sum(nlls) / 60), rel=1e-6)
    assert figures.perplexity ** (60 / extent.words) == pytest.approx(figures.word_perplexity)
    assert 2 ** (figures.bits_per_byte * extent.bytes) == pytest.approx(figures.perplexity**60)
    assert figures.perplexity_stderr == pytest.approx(figures.perplexity * figures.nll_stderr)


def test_positions_in_a_carried_pass_run_through_the_whole_document():
    plan = make_plan(documents(some_ids(41)), TOKENIZER, "carry", 8)
    scores = evaluate(random_stand_in(), plan)
    positions = measure_by_position(scores, plan)
    assert [(p.first, p.last, p.tokens) for p in positions] == [
        (1, 1, 1),
        (2, 3, 2),
        (4, 7, 4),
        (8, 15, 8),
        (16, 31, 16),
        (32, 63, 9),
    ]
    assert positions[1].nll_mean == pytest.approx(scores.nll[1:3].mean().item())


def test_positions_with_a_reference_hold_both_models():
    plan = make_plan(documents(some_ids(41)), TOKENIZER, "window", 8)
    scores = evaluate(random_stand_in(), plan, reference=random_stand_in(1))
    first = measure_by_position(scores, plan)[0]
    assert first.reference_perplexity == pytest.approx(math.exp(scores.reference_nll[::8].mean().item()))
    assert first.kl_mean == pytest.approx(scores.kl[::8].mean().item())


def test_strict_json_has_no_infinity():
    assert strict({"a": math.inf, "b": [1.5, -math.inf], 50.0: {"c": math.nan}}) == {
        "a": None,
        "b": [1.5, None],
        "50": {"c": None},
    }


def test_the_automatic_batch_is_bounded_by_the_plan():
    model = random_stand_in()
    assert automatic_batch_size([model], make_plan(documents(some_ids(9)), TOKENIZER, "step", 2)) == 4
    assert automatic_batch_size([model], make_plan(documents(some_ids(9)), TOKENIZER, "carry", 2)) == 1
    assert automatic_batch_size([model], make_plan(documents(some_ids(6001)), TOKENIZER, "window", 6000)) == 1


def test_progress_adds_up_and_ends_at_the_mean():
    plan = make_plan(documents(some_ids(60)), TOKENIZER, "window", 8)
    seen = []
    scores = evaluate(random_stand_in(), plan, 2, progress=lambda tokens, nll: seen.append((tokens, nll)))
    assert sum(tokens for tokens, _ in seen) == 59
    assert seen[-1][1] == pytest.approx(scores.nll.mean().item())


class Interrupted(Exception):
    pass


def interrupt_after(calls: int, model):
    original = model.hidden_states

    def hidden_states(*args):
        if len(model.calls) >= calls:
            raise Interrupted
        return original(*args)

    model.hidden_states = hidden_states
    return model


@pytest.mark.parametrize("mode", ["window", "carry"])
@pytest.mark.parametrize("again", [None, 2])
def test_a_resumed_run_gives_the_uninterrupted_numbers_and_scores_nothing_twice(tmp_path, mode, again):
    def plan():
        return make_plan(documents(*(some_ids(17, seed) for seed in range(5))), TOKENIZER, mode, 8)

    file = tmp_path / "run.resume"
    whole = evaluate(random_stand_in(), plan(), 2, random_stand_in(1))
    with pytest.raises(Interrupted):
        evaluate(interrupt_after(4, random_stand_in()), plan(), 2, random_stand_in(1), resume=file)
    model = random_stand_in()
    resumed = evaluate(model, plan(), again, random_stand_in(1), resume=file)
    for name in ("nll", "reference_nll", "kl", "same_top"):
        assert torch.equal(getattr(resumed, name), getattr(whole, name))
    fresh = random_stand_in()
    evaluate(fresh, plan(), 2)
    assert 0 < len(model.calls) < len(fresh.calls)
    finished = random_stand_in()
    assert torch.equal(evaluate(finished, plan(), resume=file, reference=random_stand_in(1)).nll, whole.nll)
    assert len(finished.calls) == 1  # the one that recognises the weights
    assert [path.name for path in tmp_path.iterdir()] == ["run.resume"]


def test_more_windows_at_once_than_the_memory_holds_are_refused(monkeypatch):
    monkeypatch.setattr("mamba_cli.machine.free_memory", lambda device: 5 * 2 * 8)
    plan = make_plan(documents(some_ids(9)), TOKENIZER, "step", 1)
    with pytest.raises(
        Mamba2Error, match=r"batch-size: expected at most 5, whose states of 16 bytes .*, got 8"
    ):
        evaluate(random_stand_in(), plan, 999_999_999, random_stand_in(1))
    assert evaluate(random_stand_in(), plan, 5, random_stand_in(1)).batch_size == 5


def test_a_resume_file_of_another_measurement_is_refused_naming_the_difference(tmp_path):
    file = tmp_path / "run.resume"
    plan = make_plan(documents(some_ids(30)), TOKENIZER, "window", 8)
    evaluate(random_stand_in(), plan, 2, resume=file)
    kept = file.read_bytes()
    other_window = make_plan(documents(some_ids(30)), TOKENIZER, "window", 4)
    for changed, message in [
        (lambda: evaluate(random_stand_in(), other_window, 2, resume=file), "window 4, got 8"),
        (lambda: evaluate(random_stand_in(), plan, 3, resume=file), "batch size 3, got 2"),
        (lambda: evaluate(random_stand_in(1), plan, 2, resume=file), "model's first answer"),
        (
            lambda: evaluate(
                random_stand_in(), make_plan(documents(some_ids(30, 1)), TOKENIZER, "window", 8), resume=file
            ),
            "token ids",
        ),
    ]:
        with pytest.raises(Mamba2Error, match=message):
            changed()
        assert file.read_bytes() == kept


def test_a_resume_file_in_no_folder_is_refused_before_anything_is_scored(tmp_path, monkeypatch):
    monkeypatch.setattr("mamba_cli.perplexity.evaluate.score_batch", lambda *arguments: pytest.fail("scored"))
    plan = make_plan(documents(some_ids(9)), TOKENIZER)
    with pytest.raises(Mamba2Error, match=r"run: expected an existing folder to write it to, got .*none"):
        evaluate(random_stand_in(), plan, resume=tmp_path / "none" / "run")


@pytest.mark.parametrize("content", [b"", b"not one", b"\xff" * 64])
def test_a_file_that_is_no_resume_file_is_refused_and_kept(tmp_path, content):
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(Mamba2Error, match="expected a file that an interrupted eval-ppl wrote"):
        evaluate(random_stand_in(), make_plan(documents(some_ids(9)), TOKENIZER), resume=file)
    assert file.read_bytes() == content
