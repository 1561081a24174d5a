"""Where a model takes its tensors from: a checkpoint or random numbers, placed and cast."""

import math
from collections.abc import Callable

import torch

from mamba_cli.config import ModelConfig
from mamba_cli.schema import KEPT_IN_STORED_DTYPE, tensor_shapes
from mamba_cli.state import wide_dtype


def weight_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that the tensor of canonical `name` has in a model of `dtype`."""
    parts = name.split(".")
    is_norm = len(parts) > 1 and parts[-2] in ("norm", "norm2", "norm_f")
    return wide_dtype(dtype) if is_norm or name.endswith(KEPT_IN_STORED_DTYPE) else dtype


class Weights:
    """Hands out tensors by canonical name on one device, cast to the model's dtype.

    A_log, D, the bias of dt and the weights of norms come in fp32 (float64 for a float64 model)
    whatever the model's dtype: they are small, are used in fp32, and rounding them buys nothing.
    """

    def __init__(
        self,
        load: Callable[[str], torch.Tensor],
        names: set[str],
        device: torch.device,
        dtype: torch.dtype,
        prefix: str = "",
    ):
        self._load = load
        self._names = names
        self._prefix = prefix
        self.device = device
        self.dtype = dtype

    def __call__(self, name: str) -> torch.Tensor:
        name = self._prefix + name
        dtype = weight_dtype(name, self.dtype)
        return self._load(name).to(device=self.device, dtype=dtype).contiguous()

    def optional(self, name: str) -> torch.Tensor | None:
        """Return the tensor, or None where this model has none of that name."""
        return self(name) if self._prefix + name in self._names else None

    def under(self, prefix: str) -> "Weights":
        """Return the same weights, asked for by the part of their names after `prefix`."""
        return Weights(self._load, self._names, self.device, self.dtype, self._prefix + prefix)


def random_tensors(
    config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Return fp32 tensors for `config`, distributed as mamba_ssm initialises them.

    Memory behaves as in a trained model: A is uniform in [1, 16] and dt log-uniform in
    [0.001, 0.1] (Mamba-1: A is 1 to d_state).
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        tensors[name] = _random_tensor(name.rsplit("layers.")[-1], shape, config, generator)
    return tensors


def _random_tensor(
    name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator
) -> torch.Tensor:
    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low

    def normal(deviation: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=generator.device) * deviation

    if name.endswith("A_log"):
        if config.layer == "Mamba1":
            states = torch.arange(1, config.d_state + 1, device=generator.device)
            return states.float().log().expand(shape).contiguous()
        return uniform(1, 16).log()
    if name.endswith(("dt_bias", "dt_proj.bias")):
        dt = uniform(math.log(1e-3), math.log(0.1)).exp()
        return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
    if name.endswith(".D") or "norm" in name.split(".")[-2]:
        return uniform(0.9, 1.1) if not name.endswith("bias") else uniform(-0.1, 0.1)
    if name.endswith("bias"):
        return uniform(-0.1, 0.1)
    if "conv1d" in name:
        return uniform(-0.5, 0.5)
    if name.endswith(("out_proj.weight", "fc2.weight")):
        return normal((shape[1] * config.n_layer) ** -0.5)
    if "embedding" in name or "lm_head" in name:
        return normal(0.02)
    return normal(shape[-1] ** -0.5)
