"""What a kernel has to meet: an error of the order of plain torch's in the same dtype."""

import torch


def rms(x: torch.Tensor) -> float:
    wide = torch.complex128 if x.is_complex() else torch.float64
    return torch.linalg.vector_norm(x.detach().to(wide)).item() / max(x.numel(), 1) ** 0.5


def assert_close_as_reference(
    out: torch.Tensor, ref64: torch.Tensor, ref_same_dtype: torch.Tensor, factor: float = 3.0
) -> None:
    """Assert that `out` is within `factor` times the reference's own error against float64.

    out, ref_same_dtype: the kernel's and torch's result in one dtype; ref64: the same in float64.
    A floor of 4 units of rounding of the dtype keeps an exact torch result from asking the impossible.
    """
    assert out.shape == ref64.shape, f"expected shape {tuple(ref64.shape)}, got {tuple(out.shape)}"
    assert torch.isfinite(out).all(), "output holds NaN or Inf"
    wide = torch.complex128 if ref64.is_complex() else torch.float64
    ref64 = ref64.to(out.device)
    scale = rms(ref64)
    error = rms(out.to(wide) - ref64)
    own = rms(ref_same_dtype.to(out.device).to(wide) - ref64)
    floor = 4 * torch.finfo(out.dtype).eps * scale
    bound = max(factor * own, floor)
    assert error <= bound, f"RMS error {error:.3e} passes {bound:.3e} (torch's {own:.3e}, scale {scale:.3e})"
