import pytest
import torch
import torch.nn.functional as F

from kernel_testing import assert_close_as_reference
from mamba_kernels import rmsnorm_triton
from mamba_kernels.backend import use_backend
from mamba_kernels.rmsnorm import add_norm_fn, add_norm_ref, rmsnorm_fn, rmsnorm_ref

pytestmark = pytest.mark.usefixtures("nan_filled_empty")
HALF_TYPES = [torch.bfloat16, torch.float16]


def make_inputs(rows=5, width=48, bias=True, z=True):
    """Arguments of rmsnorm_fn by name, x and z (2, rows, width)."""
    generator = torch.Generator().manual_seed(width)
    return dict(
        x=torch.randn(2, rows, width, generator=generator),
        weight=torch.randn(width, generator=generator),
        bias=torch.randn(width, generator=generator) if bias else None,
        z=torch.randn(2, rows, width, generator=generator) if z else None,
    )


def prepared(args, dtype, device="cpu"):
    """The arguments on `device` as leaves: weights float32 or wider, x and z of `dtype`, cut out of NaN."""
    ready = {}
    for name, tensor in args.items():
        if tensor is not None and name in ("weight", "bias"):
            tensor = tensor.to(device, torch.promote_types(dtype, torch.float32), copy=True).requires_grad_()
        elif tensor is not None:
            batch, rows, width = tensor.shape
            buffer = torch.full((batch, rows, width + 7), torch.nan, dtype=dtype, device=device)
            tensor = buffer[..., 3:-4].copy_(tensor).requires_grad_()
        ready[name] = tensor
    return ready


def run(args, backend, **options):
    """The output and the gradients of a fixed linear functional of it, by name."""
    with use_backend(backend):
        y = rmsnorm_fn(**args, **options)
    generator = torch.Generator().manual_seed(7)
    y.backward(torch.randn(y.shape, generator=generator).to(y))
    return {"y": y.detach(), **{"d" + k: v.grad for k, v in args.items() if v is not None}}


def check_kernel(args, device, dtype=torch.float32, **options):
    """Triton's results must be as close to float64 as those of torch in the same dtype."""
    ref64 = run(prepared(args, torch.float64), "torch", **options)
    same = run(prepared(args, dtype), "torch", **options)
    for name, result in run(prepared(args, dtype, device), "triton", **options).items():
        assert result.dtype == same[name].dtype, name
        assert_close_as_reference(result, ref64[name], same[name])


@pytest.mark.parametrize("group_size", [None, 48, 16, 3])
@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("z", [False, True])
def test_the_reference_is_the_equation_group_by_group(z, bias, norm_before_gate, group_size):
    args = make_inputs(bias=bias, z=z)
    y = rmsnorm_ref(**args, eps=1e-2, group_size=group_size, norm_before_gate=norm_before_gate)
    x64, weight64, bias64, z64 = (None if v is None else v.double() for v in args.values())
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(5)).tolist():
        row = x64[tuple(index)]
        gate = 1.0 if z64 is None else z64[tuple(index)] / (1 + (-z64[tuple(index)]).exp())
        row = row if norm_before_gate else row * gate
        for group in range(0, 48, group_size or 48):
            part = slice(group, group + (group_size or 48))
            mean_square = sum(v * v for v in row[part].tolist()) / (group_size or 48)
            expected = row[part] / (mean_square + 1e-2) ** 0.5 * weight64[part]
            expected = expected if bias64 is None else expected + bias64[part]
            expected = expected * gate[part] if norm_before_gate and z else expected
            torch.testing.assert_close(y[tuple(index)][part].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("z", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_kernels_serve_every_gate_bias_and_grouping(device, groups, z, bias, norm_before_gate):
    args = make_inputs(width=51, bias=bias, z=z)
    check_kernel(args, device, group_size=51 // groups, norm_before_gate=norm_before_gate)


@pytest.mark.parametrize("width, group_size", [(15, 15), (17, 17), (768, 768), (5120, 2560), (8192, 8192)])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_kernels_serve_every_width(device, rows, width, group_size):
    check_kernel(make_inputs(rows, width), device, group_size=group_size, norm_before_gate=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("rows, width, group_size", [(1, 768, 768), (1030, 1536, 1536), (600, 5120, 640)])
def test_the_kernels_keep_half_precision(rows, width, group_size, norm_before_gate, dtype):
    args = make_inputs(rows, width)
    options = dict(group_size=group_size, norm_before_gate=norm_before_gate)
    check_kernel(args, torch.device("cuda"), dtype, **options)


@pytest.mark.parametrize("tile_rows, parts", [(1, 2), (2, 3), (4, 1), (8, 1)])
def test_block_sizes_change_nothing(device, tile_rows, parts):
    args = prepared(make_inputs(rows=6), torch.float32, device)
    x, weight, bias, z = (v.detach().reshape(-1, v.shape[-1]) for v in args.values())
    inputs = (x, weight[0], bias[0], z, 1e-5, 16, False)
    config = {"ROWS": tile_rows, "BLOCK_N": 32, "num_warps": 2}
    forward, backward = rmsnorm_triton.rmsnorm_fwd, rmsnorm_triton.rmsnorm_bwd
    torch.testing.assert_close(forward(*inputs, config), forward(*inputs), rtol=1e-6, atol=1e-6)
    gradients = backward(torch.cos(x), *inputs, {**config, "PARTS": parts})
    for ours, default in zip(gradients, backward(torch.cos(x), *inputs), strict=True):
        torch.testing.assert_close(ours, default, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_row_of_zeros_stays_zero_and_its_gradients_finite(device, backend):
    x = torch.zeros(2, 16, device=device, requires_grad=True)
    z = torch.full((2, 16), -200.0, device=device, requires_grad=True)  # exp(200) is not finite
    weight = torch.ones(16, device=device, requires_grad=True)
    with use_backend(backend):
        y = rmsnorm_fn(x, weight, z=z, norm_before_gate=False)
    y.sum().backward()
    assert (y == 0).all()
    assert all(torch.isfinite(v.grad).all() for v in (x, z, weight))


@pytest.mark.parametrize("is_rms_norm", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [1, 17, 100, 768])
def test_add_norm_is_the_sum_and_torch_s_own_norm_of_it(device, width, bias, with_residual, is_rms_norm):
    x, weight, shift, residual = make_inputs(3, width, bias, with_residual).values()
    total = x.double() if residual is None else x.double() + residual.double()
    u = total if is_rms_norm else total - total.mean(-1, keepdim=True)
    y64 = F.rms_norm(u, (width,), weight.double(), 1e-5) + (0 if shift is None else shift.double())
    for backend in ("torch", "triton"):
        inputs = (v if v is None else v.to(device) for v in (x, residual, weight, shift))
        with use_backend(backend):
            y, residual_out = add_norm_fn(*inputs, is_rms_norm=is_rms_norm)
        torch.testing.assert_close(y.double().cpu(), y64, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(residual_out.double().cpu(), total, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("residual_in_fp32", [True, False])
@pytest.mark.parametrize("rows, width", [(1, 2560), (1100, 2560), (3, 5000)])
def test_add_norm_keeps_half_precision_and_the_residual_s_own(rows, width, residual_in_fp32, dtype):
    args = prepared(make_inputs(rows, width), dtype, "cuda")
    x, weight, bias, z = (v.detach() for v in args.values())
    residual = z.float() if residual_in_fp32 else z
    inputs = (x, residual, weight, bias)
    ours = add_norm_fn(*inputs, residual_in_fp32=residual_in_fp32)
    same = add_norm_ref(*inputs, residual_in_fp32=residual_in_fp32)
    wide = add_norm_ref(*(v.double() for v in inputs))
    assert ours[1].dtype == (torch.float32 if residual_in_fp32 else dtype)
    for result, result64, result_same in zip(ours, wide, same, strict=True):
        assert result.dtype == result_same.dtype
        assert_close_as_reference(result, result64, result_same)


@pytest.mark.gpu
def test_row_offsets_pass_two_to_the_31():
    stride = 2**30 + 64  # it fits int32, three rows of it do not
    x = torch.empty(3 * stride, device="cuda", dtype=torch.bfloat16).as_strided((3, 64), (stride, 1))
    x.copy_(torch.randn(3, 64))
    weight = torch.ones(64, device="cuda")
    torch.testing.assert_close(rmsnorm_fn(x, weight), rmsnorm_fn(x.clone(), weight), rtol=0, atol=0)


@pytest.mark.gpu
def test_gradients_are_the_same_in_every_run():
    first = run(prepared(make_inputs(3000, 1030), torch.bfloat16, "cuda"), "triton")
    for _ in range(5):
        again = run(prepared(make_inputs(3000, 1030), torch.bfloat16, "cuda"), "triton")
        for name, value in again.items():
            assert torch.equal(value, first[name]), name


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("x", torch.zeros(())),
        ("weight", torch.zeros(9)),
        ("bias", torch.zeros(2, 8)),
        ("z", torch.zeros(3, 8)),
        ("group_size", 3),
        ("group_size", 0),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, wrong):
    args = dict(x=torch.zeros(2, 8), weight=torch.zeros(8))
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        rmsnorm_fn(**{**args, name: wrong})


def test_a_residual_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"^residual: expected .*, got "):
        add_norm_fn(torch.zeros(2, 8), torch.zeros(1, 8), torch.zeros(8))


def test_a_group_too_wide_for_the_kernel_is_named(device):
    x = torch.zeros(1, 65537, device=device)
    with use_backend("triton"), pytest.raises(ValueError, match=r"^group_size: expected at most 65536"):
        rmsnorm_fn(x, x[0])
