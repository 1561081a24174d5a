"""Triton pieces that take the words of `state_codes` apart and put them together; the same bytes as there.

A tile of words (P, W) becomes a tuple of float32 tiles (P, W), one a field of the word, in the layout that
the words were loaded in. Formats are constants: KIND is the index of one in STATE_DTYPES.
"""

import triton
import triton.language as tl

from mamba_kernels.state_codes import FORMATS, SMALLEST_ROW, STATE_DTYPES

FP32, BF16, FP16, INT8, FP8, INT4 = (tl.constexpr(index) for index in range(len(STATE_DTYPES)))
_SMALLEST_ROW = tl.constexpr(SMALLEST_ROW)
_FORMATS = tl.constexpr(tuple(FORMATS.values()))


@triton.constexpr_function
def per_word(kind):
    """Numbers in a word of format `kind`."""
    return _FORMATS.value[kind].per_word


@triton.constexpr_function
def largest(kind):
    """What the largest number of a row is scaled to; 0 for formats without a scale."""
    return _FORMATS.value[kind].largest or 0.0


@triton.constexpr_function
def is_scaled(kind):
    """Whether rows of format `kind` have a scale."""
    return _FORMATS.value[kind].largest is not None


@triton.constexpr_function
def is_integer(kind):
    """Whether codes of format `kind` are integers."""
    return kind in (INT8.value, INT4.value)


@triton.constexpr_function
def mantissa(kind):
    """Bits of the mantissa of format `kind`."""
    return _FORMATS.value[kind].mantissa


@triton.constexpr_function
def min_exponent(kind):
    """The exponent of the smallest normal number of format `kind`."""
    return _FORMATS.value[kind].min_exponent


@triton.constexpr_function
def largest_code(kind):
    """The code of the largest number of format `kind`."""
    return _FORMATS.value[kind].largest_code


@triton.constexpr_function
def is_among(kind, kinds):
    """Whether bit `kind` of `kinds` is set."""
    return (kinds >> kind) & 1 != 0


@triton.jit
def decode(words, KIND: tl.constexpr):
    """The fields of int32 words, to be multiplied by the row's scale and by `decoded_unit`."""
    if KIND == FP32:
        fields = (words.to(tl.float32, bitcast=True),)
    elif KIND == BF16:
        fields = ((words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True))
    elif KIND == FP16:
        fields = _halves(words)
    elif KIND == FP8:
        # As float16 the same exponent and mantissa are 2^-8 of the number, subnormals as well.
        even = _halves((words & 0x007F007F) << 7 | (words & 0x00800080) << 8)
        odd = _halves((words & 0x7F007F00) >> 1 | words & -2147450880)
        fields = (even[0], odd[0], even[1], odd[1])
    else:
        # Codes, made unsigned by flipping their signs (0x88888888, 0x80808080).
        unsigned = words ^ (-2004318072 if KIND == INT4 else -2139062144)
        upper = unsigned >> 16
        fields = ()
        for field in tl.static_range(per_word(KIND)):
            half = unsigned if field < per_word(KIND) // 2 else upper
            fields += (_integer_field(half, field % (per_word(KIND) // 2), 32 // per_word(KIND)),)
    return fields


@triton.jit
def _integer_field(half, field: tl.constexpr, BITS: tl.constexpr):
    """A field of the lower 16 bits, an unsigned code, as the signed number that it stands for.

    It becomes the last bits of a float32 whose others are a power of two, which is then taken off: two quick
    instructions, where converting an integer is a slow one.
    """
    SHIFT: tl.constexpr = field * BITS
    bits = (half & (((1 << BITS) - 1) << SHIFT)) | ((150 - SHIFT) << 23)
    return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - SHIFT) + 2.0 ** (BITS - 1))


@triton.constexpr_function
def decoded_unit(kind):
    """What `decode` leaves out of its numbers, a factor for the scale of the row."""
    return 256.0 if kind == FP8.value else 1.0


@triton.jit
def encode(
    fields,
    p,
    w,
    key,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Round the fields of rows p (P,), columns w (W,) of words, zero outside; return words and scales (P,).

    key: from `rounding_key`. WORDS: words of a row.
    """
    FIELDS: tl.constexpr = per_word(KIND)
    LARGEST: tl.constexpr = largest(KIND)
    HASHES: tl.constexpr = (FIELDS + 3) // 4
    SHARED: tl.constexpr = FIELDS // HASHES
    scales = tl.zeros_like(p).to(tl.float32)
    if KIND == FP32:
        words = fields[0].to(tl.int32, bitcast=True)
    else:
        inverse = scales
        if LARGEST > 0:
            top = tl.abs(fields[0])
            for field in tl.static_range(1, FIELDS):
                top = tl.maximum(top, tl.abs(fields[field]))
            amax = tl.max(top, axis=1)
            kept = amax >= _SMALLEST_ROW
            scales = tl.where(kept, amax * (1 / LARGEST), 0.0)
            amax = tl.where(kept, amax, 1.0)
            inverse = tl.where(kept, tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax), 0.0)
        place = key + ((p * (HASHES * WORDS))[:, None] + w[None, :]).to(tl.uint32)
        hashes = place
        noise = tl.zeros_like(place).to(tl.int32)
        codes = ()
        for field in tl.static_range(FIELDS):
            if STOCHASTIC:
                if field % SHARED == 0:
                    hashes = mix(place + field // SHARED * WORDS)
                noise = _noise(hashes, field % SHARED * (4 // SHARED), INTERPRET)
            steps = fields[field]
            if LARGEST > 0:
                steps = mul_rn(steps, tl.broadcast_to(inverse[:, None], steps.shape), INTERPRET)
            if is_integer(KIND):
                codes += (_integer_code(steps, noise, KIND, STOCHASTIC),)
            else:
                codes += (_float_code(steps, noise, KIND, STOCHASTIC),)
        words = _word(codes, KIND, STOCHASTIC, INTERPRET)
    return words, scales


@triton.jit
def rounding_key(seed, token, head):
    """uint32 key of one head's random numbers; seed: `state_codes.first_key`."""
    return mix(mix(mix(seed.to(tl.uint32)) ^ token.to(tl.uint32)) ^ head.to(tl.uint32))


@triton.jit
def mix(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def mul_rn(x, y, INTERPRET: tl.constexpr):
    """x * y, rounded before anything is added to it."""
    if INTERPRET:
        return x * y
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _halves(words):
    """The two float16 of int32 words, as float32."""
    low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _noise(hashes, BYTE: tl.constexpr, INTERPRET: tl.constexpr):
    """16 random bits in int32: byte BYTE of uint32 hashes and the next; after the last comes the first."""
    SELECTOR: tl.constexpr = 0x4400 + (BYTE + 1) % 4 * 16 + BYTE
    return _bytes(hashes, tl.zeros_like(hashes), SELECTOR, INTERPRET).to(tl.int32)


@triton.jit
def _integer_code(steps, noise, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The code, modulo 256, in byte 2 for stochastic rounding, see `state_codes`; in byte 0 for nearest."""
    LARGEST: tl.constexpr = largest(KIND)
    if STOCHASTIC:
        return ((steps + 768.0).to(tl.int32, bitcast=True) << 2) + noise
    else:
        steps = tl.minimum(tl.maximum(steps, -LARGEST), LARGEST)
        # Beside 1.5 * 2^23 float32 has no fraction: the sum is rounded to nearest, and ends in the integer.
        return (steps + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _float_code(steps, noise, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The code of 16 bits in the upper half; that of fp8 with its sign in bit 31, the others in 20 to 26."""
    CUT: tl.constexpr = 23 - mantissa(KIND)
    MIN_EXPONENT: tl.constexpr = min_exponent(KIND)
    if MIN_EXPONENT > -126:
        steps = steps * (2.0 ** (-126 - MIN_EXPONENT))
    bits = steps.to(tl.int32, bitcast=True)
    if not STOCHASTIC:
        carry = (1 << (CUT - 1)) - 1 + ((bits >> CUT) & 1)
    elif CUT > 16:
        carry = (noise << (CUT - 16)) + (1 << (CUT - 17))
    else:
        carry = noise >> (16 - CUT)
    if KIND == FP8:
        # A row's largest may be 448 + 2^-15, a last bit more: a carry, at most 2^20 - 8, takes it no further.
        return bits + carry
    else:
        magnitude = (bits & 0x7FFFFFFF) + carry
        magnitude = tl.minimum(magnitude, ((largest_code(KIND) + 1) << CUT) - 1)
        return (magnitude << (16 - CUT)) | (bits & -2147483648)


@triton.jit
def _word(codes, KIND: tl.constexpr, STOCHASTIC: tl.constexpr, INTERPRET: tl.constexpr):
    """Put the codes of a word together, each where `_integer_code` or `_float_code` leaves it."""
    BYTE: tl.constexpr = 2 if STOCHASTIC else 0
    if KIND == INT8:
        return _byte_of_each(codes[0], codes[1], codes[2], codes[3], BYTE, INTERPRET)
    elif KIND == INT4:
        even = _byte_of_each(codes[0], codes[2], codes[4], codes[6], BYTE, INTERPRET)
        odd = _byte_of_each(codes[1], codes[3], codes[5], codes[7], BYTE, INTERPRET)
        return (even & 0x0F0F0F0F) | ((odd << 4) & -252645136)  # 0xF0F0F0F0
    elif KIND == FP8:
        # Two codes at a time move up to their signs (0x80008000).
        even = _bytes(codes[0], codes[2], 0x7632, INTERPRET)
        odd = _bytes(codes[1], codes[3], 0x7632, INTERPRET)
        even = (even & -2147450880) | ((even << 4) & 0x7F007F00)
        odd = (odd & -2147450880) | ((odd << 4) & 0x7F007F00)
        return _bytes(even, odd, 0x7351, INTERPRET)
    else:
        return _bytes(codes[0], codes[1], 0x7632, INTERPRET)


@triton.jit
def _byte_of_each(a, b, c, d, BYTE: tl.constexpr, INTERPRET: tl.constexpr):
    PAIR: tl.constexpr = (BYTE + 4) * 16 + BYTE
    return _bytes(_bytes(a, b, PAIR, INTERPRET), _bytes(c, d, PAIR, INTERPRET), 0x5410, INTERPRET)


@triton.jit
def _bytes(a, b, SELECTOR: tl.constexpr, INTERPRET: tl.constexpr):
    """A word of four bytes of a, which are 0 to 3, and of b, 4 to 7: SELECTOR's hexadecimal digits name them.

    One instruction, which the compilers don't find in shifts and masks.
    """
    if INTERPRET:
        word = tl.zeros_like(a)
        for byte in tl.static_range(4):
            source = (SELECTOR >> (4 * byte)) & 7
            part = a if source < 4 else b
            word |= ((part >> (source % 4 * 8)) & 0xFF) << (8 * byte)
        return word
    else:
        return tl.inline_asm_elementwise(
            _permute(SELECTOR), "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=1
        )


@triton.constexpr_function
def _permute(selector):
    return f"prmt.b32 $0, $1, $2, {selector};"
