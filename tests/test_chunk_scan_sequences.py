"""Sequences of the SSD operation: cut into parts, side by side in a batch, and packed one after the other."""

import pytest
import torch

from test_chunk_scan import check_scan, make_inputs, recurrence, scan, to_float64


@pytest.mark.parametrize("parts", [(7, 22), (23, 9), (1, 40), (40, 1), (16, 16, 16), (33, 31, 3)])
def test_a_sequence_in_parts_equals_the_whole(backend, device, parts):
    args = make_inputs(device, (2, sum(parts), 4, 8, 2, 16))
    expected_y, expected_state = recurrence(args)
    y, state, start = [], args["initial_states"], 0
    for length in parts:
        piece = {k: args[k][:, start : start + length] for k in ("x", "dt", "B", "C", "z")}
        out, state = scan({**args, **piece, "initial_states": state})
        y.append(out)
        start += length
    torch.testing.assert_close(torch.cat(y, 1).double(), expected_y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seqlen", [45, 48])
def test_a_row_alone_equals_the_row_in_a_batch(backend, device, seqlen):
    args, tolerance = make_inputs(device, (2, seqlen, 2, 8, 1, 16)), 1e-6
    if backend == "torch" and seqlen == 45:
        # The last tokens do not fill a vector, a CPU's scalar softplus rounds them differently in fp32, and
        # long exponents magnify that to 5e-6: float64 tells such rounding from a wrong result.
        args, tolerance = to_float64(args), 1e-12
    y, state = scan(args)
    rows = {k: args[k][:1] for k in ("x", "dt", "B", "C", "z", "initial_states")}
    alone_y, alone_state = scan({**args, **rows})
    torch.testing.assert_close(alone_y, y[:1], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(alone_state, state[:1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths", [(5, 20, 3), (32, 33, 31), (1, 1, 1, 90), (64,)])
def test_seq_idx_separates_packed_sequences(backend, device, lengths):
    seqlen = sum(lengths)
    # Neither the order nor the sign of an id means anything; a change of it does.
    ids = torch.tensor([7, 3, 7, -1])[: len(lengths)].repeat_interleave(torch.tensor(lengths))
    args = make_inputs(device, (2, seqlen, 4, 8, 2, 16), seq_idx=torch.stack([ids, torch.zeros_like(ids)]))
    check_scan(args)
    y, state = scan(args)
    start = 0
    for index, length in enumerate(lengths):
        piece = {k: args[k][:1, start : start + length] for k in ("x", "dt", "B", "C", "z")}
        first = args["initial_states"][:1] if index == 0 else None
        alone = scan({**args, **piece, "initial_states": first, "seq_idx": None})
        torch.testing.assert_close(y[:1, start : start + length], alone[0], rtol=1e-4, atol=1e-4)
        start += length
    torch.testing.assert_close(state[:1], alone[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [(5, 20, 3), (32, 0, 33, 31), (70,)])
@pytest.mark.parametrize("states", ["none", "first", "each"])
def test_cu_seqlens_scans_each_sequence_by_itself(backend, device, nan_filled_empty, lengths, states):
    seqlen, count = sum(lengths), len(lengths)
    args = make_inputs(device, (1, seqlen, 4, 8, 2, 16), return_varlen_states=True)
    args["cu_seqlens"] = torch.tensor([0, *lengths], device=device).cumsum(0)
    starts = torch.randn(count, 4, 8, 16, device=device)
    if states == "first":
        starts[1:] = 0
    args["initial_states"] = {"none": None, "first": starts[:1], "each": starts}[states]
    y, final, varlen = scan(args)
    bounds = args["cu_seqlens"].tolist()
    for index, length in enumerate(lengths):
        piece = {k: args[k][:, bounds[index] : bounds[index + 1]] for k in ("x", "dt", "B", "C", "z")}
        start = None if states == "none" else starts[index : index + 1]
        expected_y, expected_state = recurrence(
            {**args, **piece, "initial_states": start, "cu_seqlens": None, "return_varlen_states": False}
        )
        if length:
            torch.testing.assert_close(
                y[:, bounds[index] : bounds[index + 1]].double(), expected_y, rtol=1e-4, atol=1e-4
            )
        torch.testing.assert_close(varlen[index : index + 1].double(), expected_state, rtol=1e-4, atol=1e-4)
    assert torch.equal(final, varlen[-1:])


def test_tokens_outside_every_sequence_give_zero(backend, device, nan_filled_empty):
    args = make_inputs(device, (1, 20, 2, 8, 1, 16), cu_seqlens=torch.tensor([3, 9, 15]))
    args["initial_states"] = None
    y, _ = scan(args)
    assert not y[:, :3].any() and not y[:, 15:].any() and y[:, 3:15].all()


def test_varlen_states_ask_for_the_bounds():
    args = make_inputs("cpu", (1, 9, 4, 8, 2, 16), return_varlen_states=True)
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected "):
        scan(args)
