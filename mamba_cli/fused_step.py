"""The decode step of a plain Mamba-2 model, in three to five kernels a layer."""

from functools import partial

import torch

from mamba_cli.config import ModelConfig
from mamba_cli.model import Model
from mamba_cli.state import State, wide_dtype
from mamba_kernels.decode_layer import (
    MANY_ROWS,
    embed_step,
    in_proj_step,
    library_rows,
    lm_head_step,
    normalise_step,
    out_proj_step,
    ssm_step,
)
from mamba_kernels.decode_norm import NormBuffers
from mamba_kernels.packed_ssm_step import Preparation, packed_ssm_step
from mamba_kernels.packed_state import PackedState, advance_positions


class FusedStep:
    """Reads one token a sequence, into buffers that are made once for a batch size.

    The same function as `Model.step` followed by the head, for the configurations that `serves` names.
    """

    def __init__(self, model: Model, batch: int):
        config, weight = model.config, model.embedding
        dtype, device = weight.dtype, weight.device

        def buffer(rows: int, width: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        self.model = model
        # A product that is not normalised yet can pass float16's range.
        scaled_dtype = torch.float32 if dtype == torch.float16 else dtype
        self.hidden = NormBuffers.empty(batch, config.d_model, scaled_dtype, device)
        # Whole rows for the library: of its product in the layers, of the gated norm, of the head.
        self.product = self.gated_rows = self.head_rows = None
        if batch >= library_rows(config.d_model, dtype):
            self.hidden = NormBuffers(buffer(batch, config.d_model), None)
            self.product = buffer(batch, config.d_model)
            if config.ngroups > 1 or scaled_dtype != dtype:
                self.gated_rows = buffer(batch, config.d_ssm)
        elif batch >= MANY_ROWS:
            self.head_rows = buffer(batch, config.d_model)
        self.gated = NormBuffers.empty(batch, config.d_ssm, scaled_dtype, device)
        self.residual = buffer(batch, config.d_model, wide_dtype(dtype) if config.residual_in_fp32 else dtype)
        # Rows that begin on a cache line can be read in whole vectors, whatever their length.
        self.zxbcdt = buffer(batch, -(-config.in_proj_dim // 64) * 64)[:, : config.in_proj_dim]
        self.logits = buffer(batch, config.vocab_rows)
        self.pdl = starts_early(device)

    @staticmethod
    def serves(config: ModelConfig) -> bool:
        """Whether a model of `config` is plain enough: Mamba-2 and RMSNorm throughout, no MLPs."""
        plain = config.layer == "Mamba2" and config.rms_norm and not config.attn_layer_idx
        return plain and not config.mlp_dim and not config.d_mlp

    def __call__(self, token_ids: torch.Tensor, state: State) -> torch.Tensor:
        """Read token_ids (batch,), update `state` in place, return logits (batch, vocab_rows).

        The logits lie in a buffer that the next call overwrites.
        """
        model, config = self.model, self.model.config
        norms = [block.norm.weight for block in model.blocks[1:]] + [model.norm_f.weight]
        normed = embed_step(
            token_ids,
            model.embedding,
            model.blocks[0].norm.weight,
            config.norm_eps,
            self.residual,
            self.hidden,
        )
        for block, memory, next_norm in zip(model.blocks, state.layers, norms, strict=True):
            mixer, advance, prepare = block.mixer, ssm_step, None
            if isinstance(memory.ssm, PackedState):
                advance = partial(packed_ssm_step, prepared=True)
                prepare = Preparation(memory.ssm, mixer.dt_bias, mixer.A_log, config.dt_limit)
            with memory.opened_window(mixer.conv_weight.dtype) as conv_state:
                in_proj_step(
                    normed,
                    mixer.in_proj.weight,
                    mixer.in_proj.bias,
                    conv_state,
                    mixer.conv_weight,
                    mixer.conv_bias,
                    self.zxbcdt,
                    d_ssm=config.d_ssm,
                    prepare=prepare,
                    pdl=self.pdl and conv_state is memory.conv,  # else a kernel has just written it
                )
            gated = advance(
                self.zxbcdt,
                memory.ssm,
                mixer.dt_bias,
                mixer.A_log,
                mixer.D,
                mixer.norm_weight,
                config.gated_norm_eps,
                self.gated,
                ngroups=config.ngroups,
                dt_limit=config.dt_limit,
                norm_before_gate=config.norm_before_gate,
                pdl=self.pdl,
            )
            if self.gated_rows is not None:
                gated = normalise_step(gated, self.gated_rows, pdl=self.pdl)
            normed = out_proj_step(
                gated,
                mixer.out_proj.weight,
                mixer.out_proj.bias,
                self.residual,
                next_norm,
                config.norm_eps,
                self.hidden,
                product=self.product,
                pdl=self.pdl,
            )
        if self.head_rows is not None:
            normed = normalise_step(normed, self.head_rows, pdl=self.pdl)
        lm_head_step(normed, model.head.weight, self.logits, pdl=self.pdl)
        advance_positions(state.packed)
        state.seqlen += 1
        return self.logits


def starts_early(device: torch.device) -> bool:
    """Whether `device` has programmatic dependent launch: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
