"""A linear layer that keeps its weight in the layout its device multiplies fastest."""

import torch
import torch.nn.functional as F

# oneDNN reads a weight from memory 5 to 30 % faster with 4 rows to multiply than with 1 to 3.
FEWEST_ROWS = 4


class Linear:
    """y = x W^T + b for x (..., columns), W (rows, columns), b (rows,) or None.

    On a CPU the weight is kept in oneDNN's blocked layout alone: a matrix-vector product in bf16 then runs
    near the memory's bandwidth, 2 to 3 times as fast as from the plain layout, and products of a few rows
    gain as much in fp32.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.bias = bias
        self.rows, self.columns = weight.shape
        self.packed = weight.device.type == "cpu" and _packs(weight.dtype)
        self._weight = weight
        if self.packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
            self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @property
    def weight(self) -> torch.Tensor:
        """W in the plain layout: a copy where it is kept in another."""
        return self._weight.to_dense() if self.packed else self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return F.linear(x, self._weight, self.bias)
        rows = x.shape[0]
        if rows >= FEWEST_ROWS or x.dim() != 2:
            return self._multiply(x, self._weight, self.bias, "none", [], "")
        x = x.expand(FEWEST_ROWS, -1) if rows == 1 else F.pad(x, (0, 0, 0, FEWEST_ROWS - rows))
        return self._multiply(x, self._weight, self.bias, "none", [], "")[:rows]


def _packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    # oneDNN emulates bf16 on processors without AVX-512; plain torch is as good there.
    bf16 = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bf16 or dtype == torch.float32
