"""One token through a Mamba-2 mixer, and the norm before it, in as few torch operations as it takes.

For a CPU, and for torch on any device. On rows this short an operation costs its microsecond or two whatever
it does, so a step is as fast as it has few of them: what depends on weights alone is prepared once, results
are written over operands that are not needed again, and all but the tokens' window is in one dtype, "wide":
float32, or float64 in a float64 model.
"""

import math

import torch
import torch.nn.functional as F


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, over each group of a row (arXiv 1910.07467, equation 4).

    Computed as x / hypot(|x|, sqrt(n eps)) * (sqrt(n) weight) with n values a group, for |x| is one operation.
    weight: (width,), wide.
    """

    def __init__(self, weight: torch.Tensor, eps: float, ngroups: int = 1):
        group_size = weight.shape[0] // ngroups
        self.group = (ngroups, group_size)
        self.weight = weight * math.sqrt(group_size)
        self.floor = weight.new_tensor(math.sqrt(group_size * eps))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x (rows, width), wide and contiguous; returns a new tensor."""
        groups = x.view(-1, *self.group)
        length = torch.linalg.vector_norm(groups, dim=-1, keepdim=True).hypot_(self.floor)
        return (groups / length).view_as(x).mul_(self.weight)


class MixerStep:
    """What a mixer does between its projections, for one token (Dao and Gu 2024, section 7 and figure 6).

        window = the last d_conv values of xBC;   x, B, C = silu(sum over k of taps[k] window[k] + bias)
        dt = clamp(softplus(dt + dt_bias), *dt_limit)
        h  = exp(dt A) h + dt x B^T;   y = h C + D x
        y  = norm(y * silu(z)),  or norm(y) * silu(z) where norm_before_gate

    Args:
        conv_weight: (conv_dim, d_conv). conv_bias: (conv_dim,) or None.
        dt_bias, A: (nheads,), wide; A is negative. D: (nheads,) or (nheads, headdim), wide.
        norm_weight: (d_ssm,), wide, in ngroups groups; None for no norm.
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
        self.conv_bias = None if conv_bias is None else conv_bias.to(self.wide)
        self.dt_bias, self.A = dt_bias, A
        self.D = D[:, None] if D.dim() == 1 else D
        self.norm = None if norm_weight is None else RMSNorm(norm_weight, eps, ngroups)
        self.norm_before_gate = norm_before_gate
        self.ngroups = ngroups
        self.dt_limit = None if tuple(dt_limit) == (0.0, math.inf) else dt_limit  # softplus keeps to that

    def __call__(
        self,
        z: torch.Tensor,
        xBC: torch.Tensor,
        dt: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
    ) -> torch.Tensor:
        """Read one token and advance both states in place.

        z: (batch, d_ssm), xBC: (batch, conv_dim), dt: (batch, nheads), of the model's dtype.
        conv_state: (batch, conv_dim, d_conv), newest column last. ssm_state: (batch, nheads, headdim,
        d_state), contiguous; where it is not wide it is rounded once, and y is made before that.
        Returns y (batch, d_ssm), wide.
        """
        batch, nheads, headdim, d_state = ssm_state.shape
        ngroups = self.ngroups
        conv = self._convolve(xBC, conv_state)
        x, B, C = conv.split_with_sizes((nheads * headdim, ngroups * d_state, ngroups * d_state), 1)
        x = x.view(batch, nheads, headdim)
        dt = F.softplus(dt + self.dt_bias)
        if self.dt_limit is not None:
            dt.clamp_(*self.dt_limit)

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
        y = y.view(batch, nheads, headdim).addcmul_(self.D, x).view(batch, -1)
        return self._gate(y, F.silu(z.to(self.wide)))

    def _convolve(self, xBC: torch.Tensor, conv_state: torch.Tensor) -> torch.Tensor:
        rows = conv_state.transpose(1, 2)
        window = torch.cat((rows[:, 1:], xBC.unsqueeze(1)), 1)  # (batch, d_conv, conv_dim)
        rows.copy_(window)
        conv = (window * self.taps).sum(1)
        return F.silu(conv if self.conv_bias is None else conv.add_(self.conv_bias), inplace=True)

    def _gate(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self.norm is None:
            return y.mul_(gate)
        return self.norm(y).mul_(gate) if self.norm_before_gate else self.norm(y.mul_(gate))
