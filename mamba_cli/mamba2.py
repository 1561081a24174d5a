"""The Mamba-2 mixer (Dao and Gu 2024, section 7): projection, convolution, SSD, gated norm."""

import torch
import torch.nn.functional as F

from mamba_cli.config import ModelConfig
from mamba_cli.linear import Linear
from mamba_cli.state import SSMState
from mamba_cli.weights import Weights
from mamba_kernels.backend import backend_for
from mamba_kernels.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mamba_kernels.chunk_scan import mamba_chunk_scan_combined
from mamba_kernels.decode_norm import NormBuffers
from mamba_kernels.mixer_cpu import MixerCore
from mamba_kernels.packed_ssm_step import packed_ssm_step
from mamba_kernels.packed_state import PackedState
from mamba_kernels.rmsnorm import rmsnorm_fn
from mamba_kernels.selective_state_update import selective_state_update


class Mamba2Mixer:
    """One mixer: u (batch, seqlen, d_model) -> the same shape, with the SSM state carried along."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config = config
        self.in_proj = Linear(weights("in_proj.weight"), weights.optional("in_proj.bias"))
        self.widths = (config.d_mlp, config.d_mlp, config.d_ssm, config.conv_dim, config.nheads)
        self.conv_weight = weights("conv1d.weight").squeeze(1)
        self.conv_bias = weights.optional("conv1d.bias")
        self.dt_bias = weights("dt_bias")
        self.A_log = weights("A_log")
        self.A = -self.A_log.exp()
        D = weights("D")
        self.D = D.unflatten(0, (config.nheads, config.headdim)) if config.D_has_hdim else D
        self.norm_weight = weights("norm.weight") if config.rmsnorm else None
        self.out_proj = Linear(weights("out_proj.weight"), weights.optional("out_proj.bias"))
        self.torch_core = MixerCore(
            self.conv_weight,
            self.conv_bias,
            self.dt_bias,
            self.A,
            self.D,
            self.norm_weight,
            ngroups=config.ngroups,
            dt_limit=config.dt_limit,
            eps=config.gated_norm_eps,
            norm_before_gate=config.norm_before_gate,
        )

    def prefill(self, u: torch.Tensor, state: SSMState) -> torch.Tensor:
        """Read seqlen tokens; `state` is updated in place."""
        z0, x0, *zxbcdt = self._split(self.in_proj(u))
        read = self.torch_core.prefill if backend_for(u.device) == "torch" else self._prefill
        with state.opened_window(u.dtype) as conv_state, state.opened(self.A, u.shape[1]) as ssm_state:
            y = read(*zxbcdt, conv_state, ssm_state)
        return self.out_proj(self._beside_mlp(y, z0, x0))

    def step(self, u: torch.Tensor, state: SSMState) -> torch.Tensor:
        """Read one token, u (batch, d_model); `state` is updated in place."""
        on_torch = backend_for(u.device) == "torch"
        zxbcdt = self.in_proj(u)
        z0, x0, *zxbcdt = self._split(zxbcdt.to(self.A.dtype) if on_torch else zxbcdt)
        if isinstance(state.ssm, PackedState):
            advance = self._step_packed
        else:
            advance = self.torch_core.step if on_torch else self._step
        with state.opened_window(u.dtype) as conv_state:
            y = advance(*zxbcdt, conv_state, state.ssm)
        return self.out_proj(self._beside_mlp(y, z0, x0).to(u.dtype))

    def _split(self, zxbcdt: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return zxbcdt.split_with_sizes(self.widths, -1)

    def _beside_mlp(self, y: torch.Tensor, z0: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.silu(z0) * x0, y], -1) if self.config.d_mlp else y

    def _prefill(
        self,
        z: torch.Tensor,
        xBC: torch.Tensor,
        dt: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
    ) -> torch.Tensor:
        """What `MixerCore.prefill` does, by kernels."""
        config = self.config
        window = xBC.transpose(1, 2)
        conv = causal_conv1d_fn(
            window,
            self.conv_weight,
            self.conv_bias,
            initial_states=conv_state[..., 1:],
            activation="silu",
        ).transpose(1, 2)
        advance_window(conv_state, window)
        x, B, C = self._split_conv(conv)
        y, final_states = mamba_chunk_scan_combined(
            x,
            dt,
            self.A,
            B,
            C,
            config.chunk_size,
            D=self.D,
            z=None if config.rmsnorm else z.unflatten(-1, (config.nheads, config.headdim)),
            dt_bias=self.dt_bias,
            initial_states=ssm_state,
            dt_softplus=True,
            dt_limit=config.dt_limit,
            return_final_states=True,
        )
        ssm_state.copy_(final_states)
        return self._norm(y.flatten(-2), z)

    def _step(
        self,
        z: torch.Tensor,
        xBC: torch.Tensor,
        dt: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
    ) -> torch.Tensor:
        """What `MixerCore.step` does, by kernels."""
        config = self.config
        conv = causal_conv1d_update(xBC, conv_state, self.conv_weight, self.conv_bias, "silu")
        x, B, C = self._split_conv(conv)
        dt = F.softplus(dt + self.dt_bias).clamp(*config.dt_limit)
        heads = (-1, config.nheads, config.headdim)
        y = selective_state_update(
            ssm_state,
            x,
            dt[..., None].expand(heads),
            self.A[:, None, None].expand(*heads[1:], config.d_state),
            B,
            C,
            D=self.D if config.D_has_hdim else self.D[:, None].expand(heads[1:]),
            z=None if config.rmsnorm else z.unflatten(-1, heads[1:]),
        )
        return self._norm(y.flatten(-2), z)

    def _step_packed(
        self,
        z: torch.Tensor,
        xBC: torch.Tensor,
        dt: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: PackedState,
    ) -> torch.Tensor:
        """The same on a packed state, whose position is advanced after all layers (`Model.step`)."""
        config = self.config
        conv = causal_conv1d_update(xBC, conv_state, self.conv_weight, self.conv_bias, "silu")
        y = packed_ssm_step(
            torch.cat([z, conv, dt], -1),
            ssm_state,
            self.dt_bias,
            self.A_log,
            self.D,
            None,
            config.gated_norm_eps,
            NormBuffers(torch.empty_like(z), None),
            ngroups=config.ngroups,
            dt_limit=config.dt_limit,
            norm_before_gate=config.norm_before_gate,
            gate=False,
        ).scaled
        return y * F.silu(z) if self.norm_weight is None else self._norm(y, z)

    def _split_conv(self, conv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        config = self.config
        bc = config.ngroups * config.d_state
        x, B, C = conv.split((config.d_ssm, bc, bc), -1)
        groups = (config.ngroups, config.d_state)
        return (
            x.unflatten(-1, (config.nheads, config.headdim)),
            B.unflatten(-1, groups),
            C.unflatten(-1, groups),
        )

    def _norm(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        config = self.config
        if self.norm_weight is None:
            return y
        return rmsnorm_fn(
            y,
            self.norm_weight,
            None,
            z=z,
            eps=config.gated_norm_eps,
            group_size=config.d_ssm // config.ngroups,
            norm_before_gate=config.norm_before_gate,
        )


def advance_window(window: torch.Tensor, x: torch.Tensor) -> None:
    """Shift `window` (batch, channels, width) in place until x (batch, channels, seqlen) is its end."""
    width = window.shape[-1]
    if x.shape[-1] >= width:
        window.copy_(x[..., -width:])
    else:
        window.copy_(torch.cat([window[..., x.shape[-1] :], x], -1))
