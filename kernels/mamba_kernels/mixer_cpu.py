"""What a mixer does between its projections, for a CPU (or torch on any device).

On rows as short as a token's, a torch operation costs its microsecond or two whatever it does, and on long
ones what its passes over memory cost. So there are few operations, what depends on weights alone is prepared
once, results are written over operands that are not needed again, and a prompt is read in pieces whose
float32 copies stay in the cache. "Wide" below is float32, or float64 in a float64 model.
"""

import math

import torch
import torch.nn.functional as F

from mamba_kernels.chunk_scan_torch import ssd_chunked_
from mamba_kernels.discretization import LOG2E

# Tokens of a prompt that go through the convolution, the scan and the gate at once.
PIECE = 256


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, over each group of a row (arXiv 1910.07467, equation 4).

    Computed as x / hypot(|x|, sqrt(n eps)) * (sqrt(n) weight), n values a group: |x| is one operation.
    weight: (width,), wide.
    """

    def __init__(self, weight: torch.Tensor, eps: float, ngroups: int = 1):
        group_size = weight.shape[0] // ngroups
        self.group = None if ngroups == 1 else (ngroups, group_size)
        self.weight = weight * math.sqrt(group_size)
        self.floor = weight.new_tensor(math.sqrt(group_size * eps))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x (..., width), wide and contiguous; returns a new tensor."""
        groups = x if self.group is None else x.unflatten(-1, self.group)
        length = torch.linalg.vector_norm(groups, dim=-1, keepdim=True).hypot_(self.floor)
        y = groups / length
        return (y if self.group is None else y.view(x.shape)).mul_(self.weight)


class MixerCore:
    """From in_proj's output to out_proj's input (Dao and Gu 2024, section 7 and figure 6), token by token:

        window = the last d_conv values of xBC;   x, B, C = silu(sum over k of taps[k] window[k] + bias)
        dt = clamp(softplus(dt + dt_bias), *dt_limit)
        h  = exp(dt A) h + dt x B^T;   y = h C + D x
        y  = norm(y * silu(z)),  or norm(y) * silu(z) where norm_before_gate

    Args:
        conv_weight: (conv_dim, d_conv). conv_bias: (conv_dim,) or None.
        dt_bias, A: (nheads,), wide; A is negative. D: (nheads,) or (nheads, headdim), wide.
        norm_weight: (d_ssm,), wide, in ngroups groups; None for no norm.

    Both methods take z (batch, ..., d_ssm), xBC (batch, ..., conv_dim) and dt (batch, ..., nheads), z to be
    overwritten, and advance two states in place: conv_state (batch, conv_dim, d_conv), newest column last,
    and ssm_state (batch, nheads, headdim, d_state), contiguous; one that is not wide is rounded once a call,
    after y was made of it. They return y (batch, ..., d_ssm) in z's dtype.
    """

    def __init__(
        self,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        dt_bias: torch.Tensor,
        A: torch.Tensor,
        D: torch.Tensor,
        norm_weight: torch.Tensor | None,
        *,
        ngroups: int,
        dt_limit: tuple[float, float],
        eps: float,
        norm_before_gate: bool,
    ):
        self.wide = A.dtype
        self.taps = conv_weight.to(self.wide).t().contiguous()  # (d_conv, conv_dim)
        self.conv_bias = A.new_zeros(()) if conv_bias is None else conv_bias.to(self.wide)
        self.dt_bias, self.A, self.D = dt_bias, A, D
        self.skip = D[:, None] if D.dim() == 1 else D  # (nheads, 1 or headdim)
        self.norm = None if norm_weight is None else RMSNorm(norm_weight, eps, ngroups)
        self.norm_before_gate = norm_before_gate
        self.ngroups = ngroups
        self.dt_limit = None if tuple(dt_limit) == (0.0, math.inf) else dt_limit  # softplus keeps to that

    def step(
        self,
        z: torch.Tensor,
        xBC: torch.Tensor,
        dt: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
    ) -> torch.Tensor:
        """Read one token: z, xBC and dt without an axis for tokens, and wide."""
        batch, nheads, headdim, d_state = ssm_state.shape
        ngroups = self.ngroups
        conv = _convolve_token(xBC, conv_state, self.taps, self.conv_bias)
        x, B, C = self._split(conv, d_state)
        x = x.view(batch, nheads, headdim)
        dt = self._step_sizes(dt)

        h = ssm_state.to(self.wide)
        h.mul_(torch.mul(dt, self.A).exp_().view(batch, nheads, 1, 1))
        dtx = x * dt.view(batch, nheads, 1)
        h.view(batch, ngroups, -1, d_state).addcmul_(
            dtx.view(batch, ngroups, -1, 1), B.view(batch, ngroups, 1, d_state)
        )
        if h is not ssm_state:
            ssm_state.copy_(h)
        # A product a head: each thread then reads of h what it has written, and finds it in its cache.
        C = C.view(batch, ngroups, 1, d_state).expand(-1, -1, nheads // ngroups, -1)
        y = torch.bmm(C.reshape(-1, 1, d_state), h.view(-1, headdim, d_state).transpose(1, 2))
        y = y.view(batch, nheads, headdim).addcmul_(self.skip, x).view(batch, -1)
        return self._gate(y, F.silu(z, inplace=True))

    def prefill(
        self,
        z: torch.Tensor,
        xBC: torch.Tensor,
        dt: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
    ) -> torch.Tensor:
        """Read seqlen >= 1 tokens: z, xBC and dt (batch, seqlen, ...), in the model's dtype."""
        _, nheads, headdim, d_state = ssm_state.shape
        window = past = conv_state.transpose(1, 2)
        h = ssm_state.to(self.wide)
        y = torch.empty_like(z, memory_format=torch.contiguous_format)
        for start in range(0, z.shape[1], PIECE):
            tokens = slice(start, start + PIECE)
            rows = torch.cat((past, xBC[:, tokens]), 1)
            past = rows[:, -window.shape[1] :]
            x, B, C = self._split(self._convolve(rows.to(self.wide)).to(z.dtype), d_state)
            heads, groups = (nheads, headdim), (self.ngroups, d_state)
            x, B, C = x.unflatten(-1, heads), B.unflatten(-1, groups), C.unflatten(-1, groups)
            scanned = ssd_chunked_(x, self._step_sizes(dt[:, tokens]), self.A, B, C, self.D, h, None)
            gate = F.silu(z[:, tokens].to(self.wide), inplace=True)
            y[:, tokens] = self._gate(scanned.flatten(-2).to(self.wide), gate)
        window.copy_(past)
        if h is not ssm_state:
            ssm_state.copy_(h)
        return y

    def _convolve(self, rows: torch.Tensor) -> torch.Tensor:
        """silu(convolution) of all but the first d_conv of rows (batch, d_conv + seqlen, conv_dim)."""
        d_conv = self.taps.shape[0]
        conv = torch.addcmul(self.conv_bias, rows[:, d_conv:], self.taps[-1])
        for back in range(1, d_conv):
            conv.addcmul_(rows[:, d_conv - back : -back], self.taps[-1 - back])
        return F.silu(conv, inplace=True)

    def _split(self, conv: torch.Tensor, d_state: int) -> tuple[torch.Tensor, ...]:
        bc = self.ngroups * d_state
        return conv.split_with_sizes((conv.shape[-1] - 2 * bc, bc, bc), -1)

    def _step_sizes(self, dt: torch.Tensor) -> torch.Tensor:
        dt = F.softplus(dt + self.dt_bias)
        return dt if self.dt_limit is None else dt.clamp_(*self.dt_limit)

    def _gate(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Norm and gate of y, wide, which is overwritten."""
        if self.norm is None:
            return y.mul_(gate)
        return self.norm(y).mul_(gate) if self.norm_before_gate else self.norm(y.mul_(gate))


class Mamba1Core:
    """A token between the projections of a Mamba-1 mixer (Gu and Dao 2023, section 3 and algorithm 2):

        x = silu(sum over k of taps[k] window[k] + bias)                        convolve
        h = exp(dt A) h + dt x B;   y = (h C + D x) silu(z)                     advance

    Args:
        conv_weight: (d_inner, d_conv). conv_bias: (d_inner,) or None.
        dt_bias, D: (d_inner,), wide. A: (d_inner, d_state), wide and negative.
    """

    def __init__(
        self,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        dt_bias: torch.Tensor,
        A: torch.Tensor,
        D: torch.Tensor,
    ):
        self.wide = A.dtype
        self.taps = conv_weight.to(self.wide).t().contiguous()  # (d_conv, d_inner)
        self.conv_bias = A.new_zeros(()) if conv_bias is None else conv_bias.to(self.wide)
        self.dt_bias, self.D = dt_bias, D
        self.A_base2 = A * LOG2E  # exp2 takes a third of exp's time

    def convolve(self, x: torch.Tensor, conv_state: torch.Tensor) -> torch.Tensor:
        """Read x (batch, d_inner), wide; move conv_state (batch, d_inner, d_conv) on, return x, wide."""
        return _convolve_token(x, conv_state, self.taps, self.conv_bias)

    def advance(
        self,
        x: torch.Tensor,
        z: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        ssm_state: torch.Tensor,
    ) -> torch.Tensor:
        """Advance ssm_state (batch, d_inner, d_state) in place, which is rounded, if at all, after its use.

        x, z, dt: (batch, d_inner); B, C: (batch, d_state); all wide, dt without its bias, z to be
        overwritten. Returns y (batch, d_inner), wide.
        """
        dt = F.softplus(dt + self.dt_bias)
        h = ssm_state.to(self.wide)
        h.mul_(torch.mul(dt.unsqueeze(-1), self.A_base2).exp2_())
        h.addcmul_((dt * x).unsqueeze(-1), B.unsqueeze(1))
        if h is not ssm_state:
            ssm_state.copy_(h)
        y = torch.bmm(h, C.unsqueeze(-1)).squeeze(-1)
        return y.addcmul_(self.D, x).mul_(F.silu(z, inplace=True))


def _convolve_token(
    x: torch.Tensor, conv_state: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """silu(convolution) at x (batch, channels), wide, after which conv_state has x as its newest column."""
    rows = conv_state.transpose(1, 2)
    window = torch.cat((rows[:, 1:], x.unsqueeze(1)), 1)  # (batch, d_conv, channels)
    rows.copy_(window)
    return F.silu(window.mul_(taps).sum(1).add_(bias), inplace=True)
