"""How a recurrent state is kept in few bits: the formats, their bytes, and how numbers are rounded to them.

A row of a state, `d_state` numbers, is kept as 32-bit words. A word holds 32 / bits numbers, from its low
bits up the columns w, w + words, w + 2 * words, ..., so that a kernel takes a tile of words apart into tiles
of neighbouring columns, without moving anything between threads. A row of int8, fp8, int4 or fp16 has a
scale, its largest magnitude divided by the format's; rows below 2^-100 throughout are kept as zero.

Rounding is to nearest, ties to even, or stochastic: up with the probability of the part that is lost, so
right on average (Gupta et al. 2015, https://arxiv.org/abs/1502.02551, section 3), from 16 random bits. These
come from a hash of a key and of the word's place, so that a kernel on any device, and this file, round the
same float32 numbers to the same bytes. Nothing here depends on how a compiler fuses products and sums: of
two roundings in a row, one is always exact, or guarded by `mul_rn` in the kernel.

Integers go up with the probability of their fraction after this has been rounded to nearest at 2^-14, so
that they are off by at most 2^-15 of a step on average; floats by at most 2^-17 (bf16 and fp16 by nothing).
Up to four numbers of a word share the 32 bits of a hash, a byte of which is the high one of each: the errors
of two of them have a covariance of at most 2^-10 of a step squared, the variance of one being up to 2^-2.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

ROUNDINGS = ("nearest", "stochastic")
# Of a smaller row the reciprocal scale could pass float32's range.
SMALLEST_ROW = 2.0**-100


class StateDtype(NamedTuple):
    """A format of one number. Integers have no mantissa; bits of exponents follow from the bias.

    largest: the magnitude that a row's largest number is scaled to, None for no scale.
    mantissa: bits of the mantissa. min_exponent: of the smallest normal number; below it lie subnormals.
    largest_code: of the largest finite number, without its sign.
    """

    bits: int
    largest: float | None
    mantissa: int = 0
    min_exponent: int = 0
    largest_code: int = 0

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    def words(self, d_state: int) -> int:
        """32-bit words of a row."""
        return -(-d_state // self.per_word)


FORMATS = {
    "fp32": StateDtype(32, None),
    "bf16": StateDtype(16, None, 7, -126, 0x7F7F),
    "fp16": StateDtype(16, 65504.0, 10, -14, 0x7BFF),
    "int8": StateDtype(8, 127.0),
    "fp8": StateDtype(8, 448.0, 3, -6, 0x7E),  # e4m3 without infinities: https://arxiv.org/abs/2209.05433
    "int4": StateDtype(4, 7.0),
}
STATE_DTYPES = tuple(FORMATS)


def encode(
    state: torch.Tensor, dtype: str, keys: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Round `state` (heads, headdim, d_state), float32 and finite, to `dtype`.

    keys: (heads,) int32 from `rounding_keys` for stochastic rounding, None for rounding to nearest.

    Returns:
        Words (heads, headdim, words a row), int32, and scales (heads, headdim), float32, or None.
    """
    kind = FORMATS[dtype]
    if kind.bits == 32:
        return state.contiguous().view(torch.int32), None
    scales = None
    if kind.largest is not None:
        amax = state.abs().amax(-1)
        kept = amax >= SMALLEST_ROW
        scales = torch.where(kept, amax * (1 / kind.largest), 0.0)
        inverse = torch.where(kept, torch.full_like(amax, kind.largest) / amax, 0.0)
        state = state * inverse[..., None]
    words = kind.words(state.shape[-1])
    fields = F.pad(state, (0, words * kind.per_word - state.shape[-1])).unflatten(-1, (kind.per_word, words))
    noise = None if keys is None else _random16(keys, *fields.shape[1:])
    codes = _float_codes(fields, kind, noise) if kind.mantissa else _integer_codes(fields, kind, noise)
    packed = codes[..., 0, :]
    for field in range(1, kind.per_word):
        packed = packed | codes[..., field, :] << field * kind.bits
    return packed, scales


def decode(words: torch.Tensor, scales: torch.Tensor | None, dtype: str, d_state: int) -> torch.Tensor:
    """The float32 numbers (..., headdim, d_state) of `words` (..., headdim, words a row), int32.

    scales: (..., headdim), ignored where `dtype` has none.
    """
    kind = FORMATS[dtype]
    if kind.bits == 32:
        return words.view(torch.float32)
    numbers = _numbers(words, dtype)
    fields = torch.empty(*words.shape[:-1], kind.per_word, words.shape[-1], device=words.device)
    fields.copy_(numbers.transpose(-1, -2))
    state = fields.flatten(-2)[..., :d_state]
    return state if kind.largest is None else state * scales[..., None]


def dot(words: torch.Tensor, scales: torch.Tensor | None, dtype: str, vector: torch.Tensor) -> torch.Tensor:
    """Products (..., headdim) of the rows of `words` with vector (..., d_state), in the vector's dtype.

    What `decode` gives times `vector`, but for the order of a sum and of its factors: the numbers are
    multiplied in the order in which they lie in memory, and the scale once a row.
    """
    kind = FORMATS[dtype]
    count = words.shape[-1]
    fields = F.pad(vector, (0, count * kind.per_word - vector.shape[-1]))
    fields = fields.unflatten(-1, (kind.per_word, count))
    numbers = _numbers(words, dtype).flatten(-2).to(vector.dtype)
    y = (numbers @ fields.transpose(-1, -2).flatten(-2)[..., None]).squeeze(-1)
    return y if kind.largest is None else y * scales


def _numbers(words: torch.Tensor, dtype: str) -> torch.Tensor:
    """The numbers (..., words a row, numbers a word) as they lie in `words`, in torch's own narrow dtypes."""
    if dtype == "int4":
        parts = words.view(torch.uint8).unflatten(-1, (-1, 4))
        nibbles = torch.stack([parts << 4, parts & 0xF0], -1).flatten(-2)
        return nibbles.view(torch.int8) >> 4
    element = {
        "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8,
        "fp8": torch.float8_e4m3fn,
    }[dtype]  # fmt: skip
    return words.view(element).unflatten(-1, (-1, FORMATS[dtype].per_word))


def rounding_keys(seed: int, tokens: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """int32 keys of the random numbers that round the state of `heads` after token number `tokens`.

    The slot is left out, so that a sequence is rounded alike wherever in a batch it is.
    """
    start = torch.full_like(tokens, first_key(seed), dtype=torch.int32)
    return _mix(_mix(_mix(start) ^ tokens.int()) ^ heads.int())


def first_key(seed: int) -> int:
    """What the keys of a seed are mixed from, as a signed 32-bit number; never 0 where the seed is."""
    return _signed(seed & 0xFFFFFFFF ^ 0x9E3779B9)


def _integer_codes(fields: torch.Tensor, kind: StateDtype, noise: torch.Tensor | None) -> torch.Tensor:
    """Round in fixed point where there is noise: beside 768 = 1.5 * 2^9 float32 has 14 bits of fraction.

    Shifted by two, the fraction has the 16 bits of the noise, and the code lies above it, modulo 256. The
    largest number of a row may have become `largest` + 2^-17; the sum rounds that off, and as `largest`
    has no fraction, no noise carries it further.
    """
    if noise is None:
        codes = torch.round(fields.clamp(-kind.largest, kind.largest)).int()
    else:
        codes = ((fields + 768.0).view(torch.int32) << 2) + noise >> 16
    return codes & (1 << kind.bits) - 1


def _float_codes(fields: torch.Tensor, kind: StateDtype, noise: torch.Tensor | None) -> torch.Tensor:
    """Cut float32's bits off behind the mantissa, after adding to them.

    Scaled so that float32's subnormals begin where the format's do, exponent and mantissa are the format's.
    """
    cut = 23 - kind.mantissa
    bits = (fields * 2.0 ** (-126 - kind.min_exponent)).view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    if noise is None:
        carry = (1 << cut - 1) - 1 + (magnitude >> cut & 1)
    elif cut > 16:
        carry = (noise << cut - 16) + (1 << cut - 17)
    else:
        carry = noise >> 16 - cut
    codes = (magnitude + carry >> cut).clamp(max=kind.largest_code)
    return codes | (bits >> 32 - kind.bits) & 1 << kind.bits - 1


def _random16(keys: torch.Tensor, headdim: int, per_word: int, words: int) -> torch.Tensor:
    """16 random bits (heads, headdim, per_word, words) in int32.

    Up to four fields of a word share a hash. Each takes two neighbouring bytes of it, the first being the one
    after the last; of four fields every high byte, which decides almost always, is another.
    """
    count = -(-per_word // 4)
    shape = (headdim, count, words)
    places = torch.arange(headdim * count * words, dtype=torch.int32, device=keys.device).view(shape)
    hashes = _mix(keys[:, None, None, None] + places)
    turned = [
        hashes >> 8 * byte if byte < 3 else hashes >> 24 & 0xFF | hashes << 8
        for byte in range(0, 4, 4 * count // per_word)
    ]
    return (torch.stack(turned, 3) & 0xFFFF).flatten(2, 3)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijective hash of 32 bits whose bias is small: https://github.com/skeeto/hash-prospector."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ (x >> 15 & 0x1FFFF)) * _signed(0xD35A2D97)
    return x ^ (x >> 15 & 0x1FFFF)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
