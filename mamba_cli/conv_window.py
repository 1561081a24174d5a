"""How a convolution's window of past columns is kept: in the model's dtype, in bfloat16, or in 8 bits.

fp8 (e4m3, https://arxiv.org/abs/2209.05433) and int8 have a static scale for each channel, from the largest
magnitude that a text gave the channel; what passes the format's range is the format's largest number. A
column is rounded when it comes in. What is decoded encodes to the same bytes again, as the model's dtype is
finer than either format, so a window can be decoded, moved on, and encoded as a whole.
"""

import torch

# Of each format the largest code, and the room that its scale leaves above a channel's largest magnitude:
# fp8 is no coarser for it.
RANGES = {"fp8": (448.0, 8.0), "int8": (127.0, 1.0)}
SMALLEST_PEAK = 2.0**-100


def storage_dtype(conv_format: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that windows of `conv_format` (state_format.CONV_FORMATS) have in a model of `dtype`.

    The bytes of fp8 are uint8, for which torch has every operation.
    """
    return {"auto": dtype, "bf16": torch.bfloat16, "fp8": torch.uint8, "int8": torch.int8}[conv_format]


def static_scales(conv_format: str, peaks: torch.Tensor) -> torch.Tensor | None:
    """Return what a code of each channel is multiplied by, float32; None for a format without scales.

    peaks: (channels,) the largest magnitude that goes into each. A channel that was silent has the scale
    of its layer's loudest.
    """
    if conv_format not in RANGES:
        return None
    largest, room = RANGES[conv_format]
    peaks = torch.where(peaks > 0, peaks, peaks.max()).float().clamp(min=SMALLEST_PEAK)
    return room * peaks / largest


def decode_window(codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return a window (batch, channels, width) in `dtype`, in the memory order of its codes."""
    if scales is None:
        return codes.to(dtype)
    numbers = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
    return (numbers.float() * scales[:, None]).to(dtype)


def encode_window_(codes: torch.Tensor, window: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Fill `codes` with a window (batch, channels, width), rounded to nearest."""
    if scales is None:
        codes.copy_(window)
        return
    numbers = window.float() / scales[:, None]
    if codes.dtype == torch.uint8:
        largest, _ = RANGES["fp8"]
        codes.copy_(numbers.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8))
    else:
        largest, _ = RANGES["int8"]
        codes.copy_(numbers.round().clamp(-largest, largest))
