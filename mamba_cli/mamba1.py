"""The Mamba-1 mixer (Gu and Dao 2023, section 3): projection, convolution, selective scan, gate."""

import torch
import torch.nn.functional as F

from mamba_cli.config import ModelConfig
from mamba_cli.linear import Linear
from mamba_cli.mamba2 import advance_window
from mamba_cli.state import SSMState
from mamba_cli.weights import Weights
from mamba_kernels.backend import backend_for
from mamba_kernels.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mamba_kernels.mixer_cpu import Mamba1Core
from mamba_kernels.packed_selective_update import packed_selective_update
from mamba_kernels.packed_state import PackedState
from mamba_kernels.selective_scan import selective_scan_fn
from mamba_kernels.selective_state_update import selective_state_update


class Mamba1Mixer:
    """One mixer: u (batch, seqlen, d_model) -> the same shape, with the SSM state carried along."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config = config
        self.in_proj = Linear(weights("in_proj.weight"), weights.optional("in_proj.bias"))
        self.conv_weight = weights("conv1d.weight").squeeze(1)
        self.conv_bias = weights.optional("conv1d.bias")
        self.x_proj = Linear(weights("x_proj.weight"))
        self.dt_proj = Linear(weights("dt_proj.weight"))
        self.dt_bias = weights("dt_proj.bias")
        self.A = -weights("A_log").exp()
        self.D = weights("D")
        self.out_proj = Linear(weights("out_proj.weight"), weights.optional("out_proj.bias"))
        self.torch_core = Mamba1Core(self.conv_weight, self.conv_bias, self.dt_bias, self.A, self.D)

    def prefill(self, u: torch.Tensor, state: SSMState) -> torch.Tensor:
        """Read seqlen tokens; `state` is updated in place."""
        x, z = self.in_proj(u).transpose(1, 2).chunk(2, 1)
        with state.opened_window(u.dtype) as window:
            conv = causal_conv1d_fn(
                x, self.conv_weight, self.conv_bias, initial_states=window[..., 1:], activation="silu"
            )
            advance_window(window, x)
        dt, B, C = self._project(conv.transpose(1, 2))
        with state.opened(self.A, u.shape[1]) as ssm_state:
            ssm_state = ssm_state.view(-1, *self.A.shape)  # a packed one has an axis for its only head
            y, last = selective_scan_fn(
                conv,
                dt.transpose(1, 2),
                self.A,
                B.transpose(1, 2),
                C.transpose(1, 2),
                self.D,
                z=z,
                delta_bias=self.dt_bias,
                delta_softplus=True,
                return_last_state=True,
                initial_state=ssm_state,
            )
            ssm_state.copy_(last)
        return self.out_proj(y.transpose(1, 2))

    def step(self, u: torch.Tensor, state: SSMState) -> torch.Tensor:
        """Read one token, u (batch, d_model); `state` is updated in place."""
        if backend_for(u.device) == "torch":
            return self._step_on_torch(u, state)
        x, z = self.in_proj(u).chunk(2, -1)
        with state.opened_window(u.dtype) as window:
            conv = causal_conv1d_update(x, window, self.conv_weight, self.conv_bias, "silu")
        dt, B, C = self._project(conv)
        update = packed_selective_update if isinstance(state.ssm, PackedState) else selective_state_update
        return self.out_proj(update(state.ssm, conv, dt, self.A, B, C, self.D, z, self.dt_bias, True))

    def _step_on_torch(self, u: torch.Tensor, state: SSMState) -> torch.Tensor:
        core = self.torch_core
        x, z = self.in_proj(u).to(core.wide).chunk(2, -1)
        with state.opened_window(u.dtype) as window:
            x = core.convolve(x, window)
        dt, B, C = (part.to(core.wide) for part in self._project(x.to(u.dtype)))
        if isinstance(state.ssm, PackedState):
            y = packed_selective_update(state.ssm, x, dt, self.A, B, C, self.D, z, self.dt_bias, True)
        else:
            y = core.advance(x, z, dt, B, C, state.ssm)
        return self.out_proj(y.to(u.dtype))

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return dt (..., d_inner) before its bias, B and C (..., d_state) of x (..., d_inner)."""
        return self.dt_B_C(self.x_proj(x))

    def dt_B_C(self, dtBC: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same of what x_proj has made of x, dtBC (..., dt_rank + 2 * d_state)."""
        config = self.config
        dt, B, C = dtBC.split((config.dt_rank, config.d_state, config.d_state), -1)
        if config.bcdt_norm_eps is not None:
            dt, B, C = (_weightless_norm(part, config.bcdt_norm_eps) for part in (dt, B, C))
        return self.dt_proj(dt), B, C


def _weightless_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """FalconMamba's RMSNorm without a weight, in fp32."""
    return F.rms_norm(x.float() if x.dtype != torch.float64 else x, x.shape[-1:], eps=eps).to(x.dtype)
