"""How numbers are rounded to the codes of a state: alike in torch and in Triton, and right on average."""

import pytest
import torch
import triton
import triton.language as tl

from mamba_kernels import state_codes_triton
from mamba_kernels.backend import interpreting
from mamba_kernels.state_codes import FORMATS, STATE_DTYPES, decode, encode, rounding_keys

ROUNDED = STATE_DTYPES[1:]
SCALED = [dtype for dtype in STATE_DTYPES if FORMATS[dtype].largest]


@triton.jit
def _encode_kernel(
    state_ptr, keys_ptr, words_ptr, scales_ptr,
    HEADDIM: tl.constexpr, D_STATE: tl.constexpr, KIND: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One program a head."""
    FIELDS: tl.constexpr = state_codes_triton.per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    head = tl.program_id(0)
    p = tl.arange(0, BLOCK_P)
    w = tl.arange(0, BLOCK_W)
    row = head * HEADDIM + p
    inside = (p < HEADDIM)[:, None] & (w < WORDS)[None, :]
    fields = ()
    for field in tl.static_range(FIELDS):
        column = (field * WORDS + w)[None, :]
        kept = inside & (column < D_STATE)
        fields += (tl.load(state_ptr + row[:, None] * D_STATE + column, mask=kept, other=0.0),)
    key = tl.load(keys_ptr + head).to(tl.uint32, bitcast=True)
    words, scales = state_codes_triton.encode(fields, p, w, key, KIND, WORDS, STOCHASTIC, INTERPRET)
    tl.store(words_ptr + row[:, None] * WORDS + w[None, :], words, mask=inside)
    tl.store(scales_ptr + row, scales, mask=p < HEADDIM)


def encode_in_triton(state, dtype, keys):
    heads, headdim, d_state = state.shape
    words = FORMATS[dtype].words(d_state)
    codes = torch.empty(heads, headdim, words, dtype=torch.int32, device=state.device)
    scales = torch.empty(heads, headdim, device=state.device)
    _encode_kernel[(heads,)](
        state.contiguous(), torch.zeros_like(codes[:, 0, 0]) if keys is None else keys, codes, scales,
        HEADDIM=headdim, D_STATE=d_state, KIND=STATE_DTYPES.index(dtype), STOCHASTIC=keys is not None,
        BLOCK_P=triton.next_power_of_2(headdim), BLOCK_W=triton.next_power_of_2(words),
        INTERPRET=interpreting(),
    )  # fmt: skip
    return codes, scales if FORMATS[dtype].largest else None


def encode_alike(state, dtype, keys):
    """The words and scales of torch, once the kernel has been found to give the same."""
    words, scales = encode(state, dtype, keys)
    ours, our_scales = encode_in_triton(state, dtype, keys)
    assert torch.equal(ours, words)
    assert scales is None or torch.equal(our_scales, scales)
    return words, scales


def codes_of(state, dtype, keys):
    """What `state`, over the scale of its row, is rounded to."""
    words, scales = encode(state, dtype, keys)
    return decode(words, None if scales is None else torch.ones_like(scales), dtype, state.shape[-1])


def keys_of(heads, device="cpu"):
    heads = torch.arange(heads, device=device)
    return rounding_keys(0, torch.zeros_like(heads), heads)


def key_of_hash(wanted):
    """The key that gives the first word of a head the hash `wanted`: the steps of the hash, taken back."""

    def unshift(x):
        return x ^ x >> 15 ^ x >> 30

    x = unshift(wanted) * pow(0xD35A2D97, -1, 1 << 32) & 0xFFFFFFFF
    x = unshift(x) * pow(0x21F0AAAD, -1, 1 << 32) & 0xFFFFFFFF
    x ^= x >> 16
    return x - (1 << 32) if x >= 1 << 31 else x


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", STATE_DTYPES)
@pytest.mark.parametrize("headdim, d_state", [(1, 1), (3, 5), (7, 20), (5, 33), (2, 128)])
def test_torch_and_triton_round_to_the_same_bytes(device, headdim, d_state, dtype, rounding):
    random = generator()
    state = torch.randn(5, headdim, d_state, generator=random)
    state *= 10 ** (torch.rand(5, headdim, 1, generator=random) * 60 - 30)
    state[0] *= (torch.rand(headdim, d_state, generator=random) * -40).exp()  # deep into subnormals
    state[1, 0] = 0
    state[2, 0] = state[2, 0].sign() * 3.4e38
    state[3, 0, 0] = -0.0
    state[4, 0] *= 1e-38 / state[4, 0].abs().amax()
    keys = keys_of(5, device) if rounding == "stochastic" else None
    encode_alike(state.to(device), dtype, keys)


# Steps above a number of each format that has neighbours on both sides, a row's largest being `largest`.
@pytest.mark.parametrize("fraction", [0.5, 1 / 3, 1 / 1000, 0.999, 2**-15])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "dtype, number, step",
    [("int8", 41, 1), ("int8", 0, 1), ("int4", 3, 1), ("int4", -1, 1), ("fp8", 20, 2), ("fp8", 2**-8, 2**-9),
     ("fp16", 1, 2**-10), ("bf16", 1, 2**-7)],
)  # fmt: skip
def test_numbers_are_rounded_up_as_often_as_their_fraction_says(dtype, number, step, sign, fraction):
    rows = 4000
    exact = sign * (number + fraction * step)
    state = torch.full((rows, 1, 129), exact)
    state[..., -1] = largest = FORMATS[dtype].largest or 1.0
    found = codes_of(state, dtype, keys_of(rows))
    assert (found[..., -1] == largest).all()
    found = found[..., :-1].double()
    assert ((found == sign * number) | (found == sign * (number + step))).all()
    mean = (found.mean().item() / sign - number) / step
    deviation = (fraction * (1 - fraction) / found.numel()) ** 0.5
    assert abs(mean - fraction) <= 4 * deviation + 2**-15


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("alike", [True, False])
def test_the_errors_of_numbers_in_one_word_do_not_go_together(dtype, alike):
    per_word, rows, words = FORMATS[dtype].per_word, 2000, 64
    d_state = per_word * words
    step = {"fp8": 2.0, "fp16": 2.0**-10, "bf16": 2.0**-7}.get(dtype, 1.0)
    fraction = torch.full((d_state,), 0.5) if alike else torch.rand(d_state, generator=generator())
    state = torch.zeros(rows, 1, d_state) + {"fp8": 20.0, "fp16": 1.0, "bf16": 1.0}.get(dtype, 2.0)
    state = state + fraction * step
    state[..., 0] = FORMATS[dtype].largest or 1.0
    errors = ((codes_of(state, dtype, keys_of(rows)) - state) / step).double()
    errors = errors.unflatten(-1, (per_word, words))[..., 1:].transpose(-1, -2).reshape(-1, per_word)
    covariance = torch.cov(errors.T)
    variance = covariance.diagonal().mean()
    covariance.fill_diagonal_(0)
    # A product of two errors has the variance of one, squared.
    assert covariance.abs().max() <= 2**-10 + 4.5 * variance / len(errors) ** 0.5


@pytest.mark.parametrize("dtype", SCALED)
def test_the_largest_of_a_row_stays_what_it_is_whatever_the_random_numbers(device, dtype):
    """Scaled, it may lie a little outside of the format, where noise of 16 ones could carry it on."""
    kind, heads = FORMATS[dtype], 4096
    columns = min(4, kind.per_word)  # those of the first hash
    random = generator()
    amax = (torch.rand(heads, generator=random) + 1) * torch.logspace(-90, 90, heads, 2.0)
    amax = amax[:, None, None]
    assert (amax * (torch.full_like(amax, kind.largest) / amax) > kind.largest).any()
    state = torch.zeros(heads, 1, kind.per_word)
    state[..., :columns] = amax * (torch.randint(0, 2, (heads, 1, columns), generator=random) * 2 - 1)
    keys = torch.full((heads,), key_of_hash(0xFFFFFFFF), dtype=torch.int32)
    assert torch.equal(codes_of(state, dtype, keys), state.sign() * kind.largest)
    encode_alike(state[::512].to(device), dtype, keys[::512].to(device))


def test_the_key_of_a_hash_gives_that_hash():
    """Of 16 ones, a fraction of 2^-14 is carried; of zeros, none but a whole step is."""
    for wanted, expected in ((0xFFFFFFFF, 1), (0, 0)):
        state = torch.tensor([[[127.0, 2**-14, 2**-14, 2**-14]]])
        words, _ = encode(state, "int8", torch.tensor([key_of_hash(wanted)], dtype=torch.int32))
        assert words.view(torch.int8).flatten().tolist() == [127, expected, expected, expected]


@pytest.mark.parametrize("dtype", ROUNDED)
def test_zero_stays_zero_beside_other_numbers(device, dtype):
    state = torch.randn(3, 4, 20, generator=generator())
    state[..., 3::2] = 0
    state[1, 2] = 0
    keys = keys_of(3, device)
    keys[0] = key_of_hash(0xFFFFFFFF)
    words, scales = encode_alike(state.to(device), dtype, keys)
    found = decode(words, scales, dtype, 20)
    assert (found[..., 3::2] == 0).all() and (found[1, 2] == 0).all()
    assert (found[..., :3] != 0).any()
