"""Small Mamba-1 configurations that cover what its checkpoints can say."""

from dataclasses import replace

from model_testing import variant

MAMBA1 = variant(layer="Mamba1", headdim=1, dt_rank=4, rmsnorm=False)
FALCON = replace(MAMBA1, bcdt_norm_eps=1e-6, norm_eps=1e-6, tie_embeddings=False)

MAMBA1_VARIANTS = {
    "plain": MAMBA1,
    "dt_rank_of_one": replace(MAMBA1, dt_rank=1),
    "odd_dt_rank": replace(MAMBA1, dt_rank=7),
    "narrow_state": replace(MAMBA1, d_state=8),
    "wide_state": replace(MAMBA1, d_state=32),
    "odd_state": replace(MAMBA1, d_state=5),
    "conv_of_two": replace(MAMBA1, d_conv=2),
    "projection_bias": replace(MAMBA1, bias=True),
    "no_conv_bias": replace(MAMBA1, conv_bias=False),
    "untied": replace(MAMBA1, tie_embeddings=False),
    "as_wide_as_the_model": replace(MAMBA1, d_inner=32, d_ssm=32),
    "three_times_the_model": replace(MAMBA1, d_inner=96, d_ssm=96),
    "odd_widths": replace(MAMBA1, d_model=27, d_inner=41, d_ssm=41),
    "residual_in_model_dtype": replace(MAMBA1, residual_in_fp32=False),
    "layer_norm": replace(MAMBA1, rms_norm=False),
    "mlp": replace(MAMBA1, mlp_dim=128),
    "falcon": FALCON,
    "falcon_with_biases": replace(FALCON, bias=True, conv_bias=False, dt_rank=3, d_state=8, n_layer=3),
}
