"""The Mamba-2 mixer between its projections: split, convolution, SSD scan, gate and norm, out_proj.

Dao and Gu 2024, "Transformers are SSMs", section 7 and figure 6, as one function of in_proj's output.
"""

import torch
import torch.nn.functional as F

from mamba_kernels.causal_conv1d import causal_conv1d_fn
from mamba_kernels.checks import check, check_rank, check_shape
from mamba_kernels.chunk_scan import mamba_chunk_scan_combined
from mamba_kernels.rmsnorm import rmsnorm_fn


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: torch.Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: torch.Tensor | None = None,
    outproj_bias: torch.Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run the mixer on whole sequences; names, order and layouts as in mamba_ssm.

    Args:
        zxbcdt: (batch, seqlen, 2 * d_mlp + 2 * d_ssm + 2 * ngroups * d_state + nheads), in the order z0, x0,
            z, x, B, C, dt; d_ssm = nheads * headdim, and d_mlp, what is left, is the width of the gated
            MLP silu(z0) * x0 beside the scan, 0 in most models.
        conv1d_weight: (d_ssm + 2 * ngroups * d_state, width). conv1d_bias: its rows, or None.
        dt_bias, A: (nheads,). The step is clamp(softplus(dt + dt_bias), *dt_limit).
        D: (nheads, headdim), or (nheads,) and `headdim` is given.
        chunk_size: as in `mamba_chunk_scan_combined`, without effect.
        initial_states: (batch, nheads, headdim, d_state), of the scan; the convolution starts from zeros.
        seq_idx: (batch, seqlen) integers, which sequence packed into the row a token belongs to.
        activation: "silu", "swish" (the same) or None, of the convolution.
        rmsnorm_weight: (d_ssm,): normalise y by groups, with rmsnorm(y) * silu(z) if norm_before_gate,
            else rmsnorm(y * silu(z)). None: only the gate, y * silu(z).
        outproj_weight: (d_out, d_mlp + d_ssm), and outproj_bias (d_out,): the projection at the end.

    Returns out, (batch, seqlen, d_mlp + d_ssm or d_out), and with return_final_states also the last states
    of the scan, (batch, nheads, headdim, d_state). Raises ValueError naming the argument that does not fit.
    """
    check_rank("zxbcdt", zxbcdt, 3)
    check_rank("conv1d_weight", conv1d_weight, 2)
    check_rank("D", D, 1, 2)
    check(D.dim() == 2 or headdim is not None, "headdim", "a size where D is (nheads,)", headdim)
    nheads, headdim = D.shape if D.dim() == 2 else (D.shape[0], headdim)
    d_ssm, conv_dim = nheads * headdim, conv1d_weight.shape[0]
    d_state = (conv_dim - d_ssm) // (2 * ngroups)
    expected = f"{d_ssm} + 2 * {ngroups} * d_state rows"
    check(d_state > 0 and conv_dim == d_ssm + 2 * ngroups * d_state, "conv1d_weight", expected, conv_dim)
    d_mlp, odd = divmod(zxbcdt.shape[-1] - d_ssm - conv_dim - nheads, 2)
    expected = f"{d_ssm + conv_dim + nheads} features and twice the width of an MLP"
    check(d_mlp >= 0 and not odd, "zxbcdt", expected, zxbcdt.shape[-1])
    check_shape("rmsnorm_weight", rmsnorm_weight, (d_ssm,))
    if outproj_weight is not None:
        check_rank("outproj_weight", outproj_weight, 2)
        check_shape("outproj_weight", outproj_weight, (outproj_weight.shape[0], d_mlp + d_ssm))
        check_shape("outproj_bias", outproj_bias, outproj_weight.shape[:1])
    check(outproj_weight is not None or outproj_bias is None, "outproj_bias", "None without weight", "a bias")

    z0, x0, z, xBC, dt = zxbcdt.split((d_mlp, d_mlp, d_ssm, conv_dim, nheads), -1)
    xBC = causal_conv1d_fn(
        xBC.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx=seq_idx, activation=activation
    ).transpose(1, 2)
    x, B, C = xBC.split((d_ssm, ngroups * d_state, ngroups * d_state), -1)
    gated = rmsnorm_weight is None
    y, states = mamba_chunk_scan_combined(
        x.unflatten(-1, (nheads, headdim)),
        dt,
        A,
        B.unflatten(-1, (ngroups, d_state)),
        C.unflatten(-1, (ngroups, d_state)),
        chunk_size,
        D=D,
        z=z.unflatten(-1, (nheads, headdim)) if gated else None,
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
    )
    out = y.flatten(-2)
    if rmsnorm_weight is not None:
        out = rmsnorm_fn(
            out, rmsnorm_weight, None, z, rmsnorm_eps, d_ssm // ngroups, norm_before_gate=norm_before_gate
        )
    if d_mlp:
        out = torch.cat([F.silu(z0) * x0, out], -1)
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight, outproj_bias)
    return (out, states) if return_final_states else out
