"""The whole model: embedding, residual blocks, final norm, head. Reads top down from Model."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from mamba_cli.attention import AttentionMixer
from mamba_cli.config import ModelConfig
from mamba_cli.linear import Linear
from mamba_cli.mamba1 import Mamba1Mixer
from mamba_cli.mamba2 import Mamba2Mixer
from mamba_cli.state import AttentionState, SSMState, State
from mamba_cli.weights import Weights
from mamba_kernels.backend import backend_for
from mamba_kernels.mixer_cpu import RMSNorm
from mamba_kernels.packed_state import advance_positions
from mamba_kernels.rmsnorm import add_norm_fn


class Model:
    """A Mamba language model on tensors of one device and dtype; `state` is always updated in place."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config = config
        self.embedding = weights("backbone.embedding.weight")
        self.blocks = [
            Block(config, index, weights.under(f"backbone.layers.{index}."))
            for index in range(config.n_layer)
        ]
        self.norm_f = Norm(config, weights.under("backbone.norm_f."))
        self.head = Linear(self.embedding if config.tie_embeddings else weights("lm_head.weight"))

    def prefill(self, input_ids: torch.Tensor, state: State) -> torch.Tensor:
        """Read input_ids (batch, seqlen); return hidden (batch, seqlen, d_model) after the final norm."""
        hidden, residual = F.embedding(input_ids, self.embedding), None
        for block, memory in zip(self.blocks, state.layers, strict=True):
            hidden, residual = block(hidden, residual, block.mixer.prefill, memory)
        state.seqlen += input_ids.shape[1]
        return self.norm_f(hidden, residual)[0]

    def step(self, token_ids: torch.Tensor, state: State) -> torch.Tensor:
        """Read one token a sequence, token_ids (batch,); return hidden (batch, d_model)."""
        hidden, residual = F.embedding(token_ids, self.embedding), None
        for block, memory in zip(self.blocks, state.layers, strict=True):
            hidden, residual = block(hidden, residual, block.mixer.step, memory)
        advance_positions(state.packed)
        state.seqlen += 1
        return self.norm_f(hidden, residual)[0]


class Block:
    """Add, norm, mix; and where the model has MLPs, add, norm, MLP. The residual runs beside."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights):
        self.norm = Norm(config, weights.under("norm."))
        self.mixer = _mixer(config, index, weights.under("mixer."))
        self.norm2 = Norm(config, weights.under("norm2.")) if config.mlp_dim else None
        self.mlp = GatedMLP(weights.under("mlp.")) if config.mlp_dim else None

    def __call__(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        mix: Callable[[torch.Tensor, SSMState | AttentionState], torch.Tensor],
        memory: SSMState | AttentionState,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next hidden and residual; `mix` is the mixer's prefill or step."""
        hidden, residual = self.norm(hidden, residual)
        hidden = mix(hidden, memory)
        if self.mlp is not None:
            hidden, residual = self.norm2(hidden, residual)
            hidden = self.mlp(hidden)
        return hidden, residual


class Norm:
    """RMSNorm or LayerNorm of hidden + residual; also returns that sum, the next residual."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config = config
        self.weight = weights("weight")
        self.bias = weights.optional("bias")
        plain = config.rms_norm and config.residual_in_fp32
        self.torch_norm = RMSNorm(self.weight, config.norm_eps) if plain else None

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.torch_norm is not None and backend_for(hidden.device) == "torch":
            residual = hidden.to(self.weight.dtype) if residual is None else residual.add_(hidden)
            return self.torch_norm(residual).to(hidden.dtype), residual
        return add_norm_fn(
            hidden,
            residual,
            self.weight,
            self.bias,
            eps=self.config.norm_eps,
            residual_in_fp32=self.config.residual_in_fp32,
            is_rms_norm=self.config.rms_norm,
        )


class GatedMLP:
    """y * silu(gate), then down: fc1's rows are [y, gate]."""

    def __init__(self, weights: Weights):
        self.fc1 = Linear(weights("fc1.weight"))
        self.fc2 = Linear(weights("fc2.weight"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y, gate = self.fc1(x).chunk(2, -1)
        return self.fc2(y * F.silu(gate))


def _mixer(config: ModelConfig, index: int, weights: Weights) -> Mamba1Mixer | Mamba2Mixer | AttentionMixer:
    if index in config.attn_layer_idx:
        return AttentionMixer(config.attention, weights)
    return (Mamba1Mixer if config.layer == "Mamba1" else Mamba2Mixer)(config, weights)
