"""Which tensors a model of a given configuration has, by canonical name, and their shapes.

Canonical names are mamba_ssm's own keys. Checkpoints are checked against this, random models are
made from it, and nothing else in the toolkit repeats a shape.
"""

from mamba_cli.config import ModelConfig

# Ends of the names that stay in the precision they are stored in and are computed in fp32: exp(A_log)
# and softplus(dt_bias) magnify a rounding over the length of the text.
KEPT_IN_STORED_DTYPE = (".A_log", ".D", ".dt_bias", ".dt_proj.bias")

Shape = tuple[int, ...]


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return {canonical name: shape} in file order. A tied head is the embedding and not listed."""
    shapes: dict[str, Shape] = {"backbone.embedding.weight": (config.vocab_rows, config.d_model)}
    for index in range(config.n_layer):
        for name, shape in layer_shapes(config, index).items():
            shapes[f"backbone.layers.{index}.{name}"] = shape
    shapes |= _norm("backbone.norm_f", config)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_rows, config.d_model)
    return shapes


def layer_shapes(config: ModelConfig, index: int) -> dict[str, Shape]:
    """Return {name inside the layer: shape} of layer `index`."""
    if index in config.attn_layer_idx:
        mixer = _attention(config)
    elif config.layer == "Mamba2":
        mixer = _mamba2(config)
    else:
        mixer = _mamba1(config)
    shapes = _norm("norm", config) | {f"mixer.{name}": shape for name, shape in mixer.items()}
    if config.mlp_dim:
        shapes |= _norm("norm2", config)
        shapes["mlp.fc1.weight"] = (2 * config.mlp_dim, config.d_model)
        shapes["mlp.fc2.weight"] = (config.d_model, config.mlp_dim)
    return shapes


def _norm(name: str, config: ModelConfig) -> dict[str, Shape]:
    shapes = {f"{name}.weight": (config.d_model,)}
    if not config.rms_norm:
        shapes[f"{name}.bias"] = (config.d_model,)
    return shapes


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _conv1d(channels: int, width: int, bias: bool) -> dict[str, Shape]:
    return {"conv1d.weight": (channels, 1, width)} | ({"conv1d.bias": (channels,)} if bias else {})


def _mamba2(config: ModelConfig) -> dict[str, Shape]:
    shapes = _linear("in_proj", config.in_proj_dim, config.d_model, config.bias)
    shapes |= _conv1d(config.conv_dim, config.d_conv, config.conv_bias)
    shapes["dt_bias"] = (config.nheads,)
    shapes["A_log"] = (config.nheads,)
    shapes["D"] = (config.d_ssm if config.D_has_hdim else config.nheads,)
    if config.rmsnorm:
        shapes["norm.weight"] = (config.d_ssm,)
    return shapes | _linear("out_proj", config.d_model, config.d_inner, config.bias)


def _mamba1(config: ModelConfig) -> dict[str, Shape]:
    shapes = _linear("in_proj", config.in_proj_dim, config.d_model, config.bias)
    shapes |= _conv1d(config.d_inner, config.d_conv, config.conv_bias)
    shapes["x_proj.weight"] = (config.dt_rank + 2 * config.d_state, config.d_inner)
    shapes |= _linear("dt_proj", config.d_inner, config.dt_rank, True)
    shapes["A_log"] = (config.d_inner, config.d_state)
    shapes["D"] = (config.d_inner,)
    return shapes | _linear("out_proj", config.d_model, config.d_inner, config.bias)


def _attention(config: ModelConfig) -> dict[str, Shape]:
    attention = config.attention
    assert attention is not None  # ModelConfig refuses attention layers without it
    shapes = _linear(
        "in_proj", attention.qkv_dim + attention.mlp_dim, config.d_model, attention.qkv_proj_bias
    )
    if attention.d_conv:
        shapes |= _conv1d(attention.qkv_dim, attention.d_conv, True)
    columns = attention.num_heads * attention.head_dim + attention.mlp_dim // 2
    return shapes | _linear("out_proj", config.d_model, columns, attention.out_proj_bias)
