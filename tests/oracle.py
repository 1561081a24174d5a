"""The common oracle: a whole model in float64, token by token, written for the tests alone.

It follows the equations h = exp(dt A) h + dt x B^T, y = C h + D x and shares no code with the
toolkit but the configuration; every path of the runtime is compared with it.
"""

import torch
import torch.nn.functional as F

from mamba_cli.config import AttentionConfig, ModelConfig

Tensors = dict[str, torch.Tensor]


def oracle_logits(config: ModelConfig, tensors: Tensors, input_ids: torch.Tensor) -> torch.Tensor:
    """Return float64 logits (batch, seqlen, vocab_rows) of input_ids (batch, seqlen)."""
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    residual = tensors["backbone.embedding.weight"][input_ids]
    for index in range(config.n_layer):
        prefix = f"backbone.layers.{index}."
        layer = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        mixer = {k.removeprefix("mixer."): v for k, v in layer.items() if k.startswith("mixer.")}
        u = norm(config, layer, "norm", residual)
        if index in config.attn_layer_idx:
            residual = residual + attention(config.attention, mixer, u)
        elif config.layer == "Mamba2":
            residual = residual + mamba2(config, mixer, u)
        else:
            residual = residual + mamba1(config, mixer, u)
        if config.mlp_dim:
            y, gate = (norm(config, layer, "norm2", residual) @ layer["mlp.fc1.weight"].T).chunk(2, -1)
            residual = residual + (y * F.silu(gate)) @ layer["mlp.fc2.weight"].T
    hidden = norm(config, tensors, "backbone.norm_f", residual)
    head = tensors["backbone.embedding.weight"] if config.tie_embeddings else tensors["lm_head.weight"]
    return hidden @ head.T


def norm(config: ModelConfig, tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    if config.rms_norm:
        return rms(x, config.norm_eps) * tensors[f"{name}.weight"]
    x = x - x.mean(-1, keepdim=True)
    return rms(x, config.norm_eps) * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def causal_conv(mixer: Tensors, x: torch.Tensor) -> torch.Tensor:
    """x (batch, seqlen, channels): y[t] = sum_k w[k] x[t - width + 1 + k] + bias."""
    weight = mixer["conv1d.weight"][:, 0]
    y = torch.zeros_like(x)
    for k in range(weight.shape[1]):
        shift = weight.shape[1] - 1 - k
        if shift < x.shape[1]:
            y[:, shift:] += x[:, : x.shape[1] - shift] * weight[:, k]
    return y + mixer["conv1d.bias"] if "conv1d.bias" in mixer else y


def linear(mixer: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ mixer[f"{name}.weight"].T
    return y + mixer[f"{name}.bias"] if f"{name}.bias" in mixer else y


def mamba2(config: ModelConfig, mixer: Tensors, u: torch.Tensor) -> torch.Tensor:
    c, (batch, length, _) = config, u.shape
    bc = c.ngroups * c.d_state
    z0, x0, z, xBC, dt = linear(mixer, "in_proj", u).split(
        (c.d_inner - c.d_ssm, c.d_inner - c.d_ssm, c.d_ssm, c.d_ssm + 2 * bc, c.nheads), -1
    )
    x, B, C = F.silu(causal_conv(mixer, xBC)).split((c.d_ssm, bc, bc), -1)
    x = x.reshape(batch, length, c.nheads, c.headdim)
    # Head h reads group h // (nheads / ngroups).
    B = B.reshape(batch, length, c.ngroups, c.d_state).repeat_interleave(c.nheads // c.ngroups, 2)
    C = C.reshape(batch, length, c.ngroups, c.d_state).repeat_interleave(c.nheads // c.ngroups, 2)
    dt = F.softplus(dt + mixer["dt_bias"]).clamp(*c.dt_limit)
    A = -mixer["A_log"].exp()
    D = mixer["D"].reshape(c.nheads, -1)
    h = torch.zeros(batch, c.nheads, c.headdim, c.d_state, dtype=u.dtype)
    y = torch.empty_like(x)
    for t in range(length):
        decay = (dt[:, t] * A).exp()[..., None, None]
        h = decay * h + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        y[:, t] = (h * C[:, t, :, None]).sum(-1) + D * x[:, t]
    y = y.reshape(batch, length, c.d_ssm)
    if not c.rmsnorm:
        y = y * F.silu(z)
    else:
        if not c.norm_before_gate:
            y = y * F.silu(z)
        y = rms(y.reshape(batch, length, c.ngroups, -1), c.gated_norm_eps).reshape(batch, length, c.d_ssm)
        y = y * mixer["norm.weight"]
        if c.norm_before_gate:
            y = y * F.silu(z)
    return linear(mixer, "out_proj", torch.cat([F.silu(z0) * x0, y], -1))


def mamba1(config: ModelConfig, mixer: Tensors, u: torch.Tensor) -> torch.Tensor:
    c, (batch, length, _) = config, u.shape
    x, z = linear(mixer, "in_proj", u).chunk(2, -1)
    x = F.silu(causal_conv(mixer, x))
    dt, B, C = linear(mixer, "x_proj", x).split((c.dt_rank, c.d_state, c.d_state), -1)
    if c.bcdt_norm_eps is not None:
        dt, B, C = (rms(part, c.bcdt_norm_eps) for part in (dt, B, C))
    dt = F.softplus(linear(mixer, "dt_proj", dt))
    A = -mixer["A_log"].exp()
    h = torch.zeros(batch, c.d_inner, c.d_state, dtype=u.dtype)
    y = torch.empty_like(x)
    for t in range(length):
        h = (dt[:, t, :, None] * A).exp() * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        y[:, t] = (h * C[:, t, None]).sum(-1) + mixer["D"] * x[:, t]
    return linear(mixer, "out_proj", y * F.silu(z))


def attention(config: AttentionConfig, mixer: Tensors, u: torch.Tensor) -> torch.Tensor:
    c, (batch, length, _) = config, u.shape
    projected = linear(mixer, "in_proj", u)
    qkv, up, gate = projected.split((c.qkv_dim, c.mlp_dim // 2, c.mlp_dim // 2), -1)
    if c.d_conv:
        qkv = causal_conv(mixer, qkv)
    heads = qkv.reshape(batch, length, -1, c.head_dim)
    q, k, v = heads.split((c.num_heads, c.num_heads_kv, c.num_heads_kv), 2)
    q, k = rotary(c, q), rotary(c, k)
    k = k.repeat_interleave(c.num_heads // c.num_heads_kv, 2)
    v = v.repeat_interleave(c.num_heads // c.num_heads_kv, 2)
    y = torch.empty_like(q)
    for t in range(length):
        scores = (q[:, t, None] * k[:, : t + 1]).sum(-1) * c.softmax_scale
        y[:, t] = (scores.softmax(1)[..., None] * v[:, : t + 1]).sum(1)
    y = torch.cat([y.reshape(batch, length, -1), up * F.silu(gate)], -1)
    return linear(mixer, "out_proj", y)


def rotary(config: AttentionConfig, x: torch.Tensor) -> torch.Tensor:
    half = config.rotary_emb_dim // 2
    y = x.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if config.rotary_emb_interleaved else (i, i + half)
        frequency = config.rotary_emb_base ** (-2 * i / config.rotary_emb_dim)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequency
        y[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        y[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    return y
