"""mamba_cli.generation and mamba_cli.stops: where texts end, what is streamed, what a seed decides."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generation_testing import END, StubModel, byte_level, markov, scripted
from mamba_cli.errors import Mamba2Error
from mamba_cli.generation import Generation, Piece, generate
from mamba_cli.sampling import SamplingParams
from mamba_cli.stops import StopStrings
from mamba_cli.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0)
RANDOM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("bpe"))


def run(lm, prompt_ids, params=GREEDY, max_new_tokens=64, **options) -> tuple[list[list[str]], Generation]:
    """Return the streamed pieces of each sample, and the last event."""
    *pieces, last = generate(lm, prompt_ids, params, max_new_tokens=max_new_tokens, **options)
    assert isinstance(last, Generation) and all(isinstance(piece, Piece) and piece.text for piece in pieces)
    streamed = [[p.text for p in pieces if p.sample == i] for i in range(len(last.samples))]
    assert ["".join(parts) for parts in streamed] == [sample.text for sample in last.samples]
    return streamed, last


def say(bpe: Tokenizer, text: str, **options):
    """Run a model that says `text`, then the end of text."""
    prompt = bpe.encode("the fox")
    return run(scripted(bpe, len(prompt), bpe.encode(text)), prompt, **options)


def test_the_text_ends_at_the_end_of_text_token_and_does_not_show_it(bpe):
    _, last = say(bpe, " liked the sea. 🙂")
    (sample,) = last.samples
    assert sample.text == " liked the sea. 🙂"
    assert sample.finish_reason == "eos"
    assert sample.token_ids == [*bpe.encode(" liked the sea. 🙂"), 0]
    assert last.prompt_tokens == len(bpe.encode("the fox"))
    assert last.generated_tokens == len(sample.token_ids)


def test_ignore_eos_goes_on_and_shows_the_token(bpe):
    _, last = say(bpe, " ran", ignore_eos=True, max_new_tokens=len(bpe.encode(" ran")) + 2)
    assert last.samples[0].text == f" ran{END}{END}"
    assert last.samples[0].finish_reason == "length"


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_max_new_tokens_is_the_number_of_tokens(bpe, count):
    lm = markov(bpe)
    prompt = bpe.encode("the fox")
    _, last = run(lm, prompt, RANDOM, max_new_tokens=count, ignore_eos=True)
    assert len(last.samples[0].token_ids) == count
    assert last.samples[0].finish_reason == "length"
    assert lm.steps == max(count - 1, 0)
    assert last.prefill_tokens_per_second > 0
    assert (last.decode_tokens_per_second is None) == (count < 2)


def test_half_a_character_at_the_end_is_one_replacement_character(bpe):
    ids = bpe.encode(" 𐍈")
    _, last = say(bpe, " 𐍈", max_new_tokens=len(ids) - 1)
    assert last.samples[0].text == " \ufffd"


@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        (" in Paris now", ["Pari"], " in "),  # the stop ends inside a token
        (" alpha beta gamma delta", ["beta gamma"], " alpha "),  # and spans tokens
        (" alpha beta gamma delta", ["gamma delta!", "beta"], " alpha "),
        (" alpha beta gamma delta", ["delta", "mma"], " alpha beta ga"),
        (" alpha", ["a"], " "),
        (" alpha", [" "], ""),
        (" 你好", ["好"], " 你"),
        (" aab aaab", ["aaab"], " aab "),
        (" abc", ["bc", "abc"], " "),  # both end here: the longest counts
        (" abcd", ["bc", "abcd"], " a"),  # this one is complete first
    ],
)
def test_the_text_ends_right_before_the_stop(bpe, said, stop, text):
    _, last = say(bpe, said, stop=stop)
    assert last.samples[0].text == text
    assert last.samples[0].finish_reason == "stop"


def test_a_stop_in_the_prompt_or_across_its_end_does_not_count(bpe):
    _, last = say(bpe, " ran", stop=["fox", "fox ran"])
    assert last.samples[0].text == " ran"


def test_what_could_begin_a_stop_is_held_back_and_comes_in_the_end(bpe):
    pieces, last = say(bpe, " alpha beta gam", stop=["beta gamma"])
    assert last.samples[0].text == " alpha beta gam"
    assert last.samples[0].finish_reason == "eos"
    before = "".join(pieces[0][:-1])
    assert before == " alpha " and pieces[0][-1] == "beta gam"


def test_generation_stops_when_the_stop_is_complete(bpe):
    prompt = bpe.encode("the fox")
    lm = scripted(bpe, len(prompt), bpe.encode(" alpha beta gamma delta"))
    run(lm, prompt, stop=["beta"])
    assert lm.steps < len(bpe.encode(" alpha beta gamma"))


@settings(max_examples=300, deadline=None)
@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stops_do_not_depend_on_how_the_text_is_split(text, stops, data):
    def cut(parts):
        strings = StopStrings(stops)
        return "".join([*map(strings.push, parts), strings.finish()]), strings.found

    # By definition: read character by character until some stop string is complete.
    expected, found = text, False
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            expected, found = text[: end - max(map(len, ending))], True
            break
    splits = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    parts = [text[a:b] for a, b in zip([0, *splits], [*splits, len(text)], strict=True)]
    assert cut(parts) == cut([text]) == cut(list(text)) == (expected, found)


def test_an_empty_stop_is_refused():
    with pytest.raises(Mamba2Error, match="stop: expected"):
        StopStrings(["a", ""])


def test_padding_and_ids_without_a_token_are_never_chosen(bpe):
    lm = markov(bpe)
    lm.config.vocab_size += 2  # as in checkpoints whose configuration counts the padding
    _, last = run(lm, [5], RANDOM, max_new_tokens=300, num_samples=3, ignore_eos=True)
    assert max(max(sample.token_ids) for sample in last.samples) < bpe.vocab_size


def test_the_same_seed_gives_the_same_text_and_another_seed_another(bpe):
    texts = [run(markov(bpe), [5], RANDOM, seed=seed)[1].samples[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_sample_does_not_depend_on_how_many_there_are(bpe):
    four = run(markov(bpe), [5], RANDOM, seed=3, num_samples=4)[1].samples
    two = run(markov(bpe), [5], RANDOM, seed=3, num_samples=2)[1].samples
    one = run(markov(bpe), [5], RANDOM, seed=3, num_samples=1)[1].samples
    assert four[:2] == two and four[:1] == one
    assert len({sample.text for sample in four}) == 4


def test_several_samples_share_one_prefill_and_the_steps(bpe):
    lm = markov(bpe)
    _, last = run(lm, [5], RANDOM, num_samples=4, max_new_tokens=10, ignore_eos=True)
    assert (lm.prefills, lm.steps) == (1, 9)
    assert last.generated_tokens == 40


def test_a_sample_that_has_ended_says_no_more(bpe):
    # The first sample to choose the end-of-text token ends; the others go on after it.
    size = bpe.vocab_size

    def logits(ids):
        row = torch.full((size + 3,), -50.0)
        row[0 if len(ids) == 3 else 40] = 0.0  # even odds of the end at the third token
        row[41] = 0.0
        return row

    _, last = run(StubModel(bpe, logits), [5], RANDOM, num_samples=12, max_new_tokens=6)
    ended = [sample for sample in last.samples if sample.finish_reason == "eos"]
    going_on = [sample for sample in last.samples if sample.finish_reason == "length"]
    assert ended and going_on
    assert {len(sample.token_ids) for sample in ended} == {3}
    assert {len(sample.token_ids) for sample in going_on} == {6}


def test_repetition_penalty_counts_the_prompt_and_the_new_text(bpe):
    size = bpe.vocab_size

    def logits(ids):
        row = torch.zeros(size + 3)
        row[10:14] = torch.tensor([2.0, 1.9, 1.8, 1.7])
        return row

    model = StubModel(bpe, logits)
    _, plain = run(model, [10], max_new_tokens=3)
    _, penalised = run(model, [10], SamplingParams(temperature=0, repetition_penalty=1.5), max_new_tokens=4)
    assert plain.samples[0].token_ids == [10, 10, 10]
    # 2.0 of the prompt's token becomes 1.33; once all four are seen, the first leads again.
    assert penalised.samples[0].token_ids == [11, 12, 13, 10]


def test_a_prompt_the_model_has_no_rows_for_is_refused_with_both_numbers(bpe):
    with pytest.raises(Mamba2Error, match=f"below vocab_size {bpe.vocab_size}, got {bpe.vocab_size}"):
        run(markov(bpe), [5, bpe.vocab_size])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_reported_with_the_command_that_looks_for_the_cause(bpe, value):
    broken = StubModel(bpe, lambda ids: torch.full((bpe.vocab_size + 3,), value))
    with pytest.raises(Mamba2Error, match="logits: expected finite numbers") as caught:
        run(broken, [5])
    assert caught.value.hint == "look for the cause: mamba2 inspect stub --check"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_whatever_the_model_says_is_streamed_up_to_the_stop(bpe, text, stop):
    ids = bpe.encode(text)
    prompt = bpe.encode("the fox")
    _, last = run(
        scripted(bpe, len(prompt), ids), prompt, stop=stop, ignore_eos=True, max_new_tokens=len(ids)
    )
    strings = StopStrings(stop)
    assert last.samples[0].text == strings.push(text) + strings.finish()


def test_more_samples_than_the_memory_holds_are_refused_before_anything_is_made_for_each(bpe, monkeypatch):
    monkeypatch.setattr("mamba_cli.machine.free_memory", lambda device: 1000)
    message = (
        "num-samples: expected at most 62, whose states of 16 bytes the free memory holds, got 999999999"
    )
    with pytest.raises(Mamba2Error, match=f"^{message}$"):
        run(markov(bpe), [5, 6], RANDOM, num_samples=999_999_999)
    assert len(run(markov(bpe), [5, 6], RANDOM, num_samples=62, max_new_tokens=1)[1].samples) == 62
