"""The decode step of a plain Mamba-1 model, in four to seven kernels a layer."""

import torch

from mamba_cli.config import ModelConfig
from mamba_cli.fused_step import starts_early
from mamba_cli.mamba1 import Mamba1Mixer
from mamba_cli.model import Model
from mamba_cli.state import State, wide_dtype
from mamba_kernels.decode_layer import MANY_ROWS, embed_step, in_proj_step, lm_head_step, out_proj_step
from mamba_kernels.decode_mamba1 import mamba1_ssm_step, x_proj_step
from mamba_kernels.decode_norm import NormBuffers, Normed
from mamba_kernels.packed_selective_update import packed_selective_update
from mamba_kernels.packed_state import PackedState, advance_positions


class FusedStepMamba1:
    """Reads one token a sequence, into buffers that are made once for a batch size.

    The same function as `Model.step` followed by the head, for the configurations that `serves` names.
    packed: whether the states are; the library then multiplies by dt_proj.
    """

    def __init__(self, model: Model, batch: int, packed: bool = False):
        config, weight = model.config, model.embedding
        dtype, device = weight.dtype, weight.device
        many = batch >= MANY_ROWS

        def buffer(width: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(batch, width, dtype=dtype, device=device)

        self.model = model
        if many:
            self.hidden = NormBuffers(buffer(config.d_model), None)
        else:
            # A product that is not normalised yet can pass float16's range.
            scaled_dtype = torch.float32 if dtype == torch.float16 else dtype
            self.hidden = NormBuffers.empty(batch, config.d_model, scaled_dtype, device)
        self.residual = buffer(config.d_model, wide_dtype(dtype) if config.residual_in_fp32 else dtype)
        self.xz = buffer(config.in_proj_dim)
        self.dtBC = buffer(
            config.dt_rank + 2 * config.d_state, dtype if many or packed else wide_dtype(dtype)
        )
        self.gated = buffer(config.d_inner)
        # Where the library writes its products.
        self.dt = buffer(config.d_inner) if many else None
        self.product = buffer(config.d_model) if many else None
        self.logits = buffer(config.vocab_rows)
        self.pdl = starts_early(device)

    @staticmethod
    def serves(config: ModelConfig) -> bool:
        """Whether a model of `config` is plain enough: Mamba-1 and RMSNorm throughout, no MLPs."""
        return (
            config.layer == "Mamba1" and config.rms_norm and not config.attn_layer_idx and not config.mlp_dim
        )

    def __call__(self, token_ids: torch.Tensor, state: State) -> torch.Tensor:
        """Read token_ids (batch,), update `state` in place, return logits (batch, vocab_rows).

        The logits lie in a buffer that the next call overwrites.
        """
        model, config = self.model, self.model.config
        norms = [block.norm.weight for block in model.blocks] + [model.norm_f.weight]
        normed = embed_step(token_ids, model.embedding, norms[0], config.norm_eps, self.residual, self.hidden)
        for block, memory, next_norm in zip(model.blocks, state.layers, norms[1:], strict=True):
            mixer = block.mixer
            with memory.opened_window(mixer.conv_weight.dtype) as conv_state:
                in_proj_step(
                    normed,
                    mixer.in_proj.weight,
                    mixer.in_proj.bias,
                    conv_state,
                    mixer.conv_weight,
                    mixer.conv_bias,
                    self.xz,
                    d_ssm=0,
                    pdl=self.pdl and conv_state is memory.conv,  # else a kernel has just written it
                )
            x_proj_step(self.xz[:, : config.d_inner], mixer.x_proj.weight, self.dtBC, pdl=self.pdl)
            gated = self._advance(mixer, memory.ssm)
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
        lm_head_step(normed, model.head.weight, self.logits, pdl=self.pdl)
        advance_positions(state.packed)
        state.seqlen += 1
        return self.logits

    def _advance(self, mixer: Mamba1Mixer, ssm: torch.Tensor | PackedState) -> Normed:
        """Read the token in self.xz and self.dtBC into `ssm`; return the gated output."""
        if isinstance(ssm, PackedState):
            x, z = self.xz.chunk(2, 1)
            dt, B, C = mixer.dt_B_C(self.dtBC)
            y = packed_selective_update(ssm, x, dt, mixer.A, B, C, mixer.D, z, mixer.dt_bias, True)
            return Normed(y, None, 0.0)
        return mamba1_ssm_step(
            self.xz,
            self.dtBC,
            ssm,
            mixer.dt_proj.weight,
            mixer.dt_bias,
            mixer.A,
            mixer.D,
            self.gated,
            norm_eps=mixer.config.bcdt_norm_eps,
            dt=self.dt,
            pdl=self.pdl,
        )
