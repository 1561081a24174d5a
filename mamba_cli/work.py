"""The least work a model has to do for a prompt or for a step, in bytes moved and operations.

The shares of a machine that a benchmark reports are these figures over the time taken, so they do not
depend on how an implementation goes about it. Counted, for a model of dtype `dtype`:

    operations   2 for each matrix element a token passes (in_proj, out_proj, the MLPs; for Mamba-1 also
                 x_proj and dt_proj), 2 for each tap of the convolution, 5 for each element of the SSM state
                 (h = decay h + (dt x) B is 3, y = C h is 2: Dao and Gu 2024, arXiv 2405.21060, equation 1),
                 4 head_dim for each query, head and key of attention, and 2 for each element of the head,
                 which a prompt passes once and a step each time. Norms, gates and exponentials are not.
    bytes        every weight read once (an embedding that is not the head is not: only rows of it are
                 used), the state written once by a prompt, and read and written by each step (one with a
                 window of `w` tokens: read by each step, and a w-th of it written); keys and values written
                 once and, by a step, read up to its own position. Activations are not.
"""

import math
from typing import NamedTuple

import torch

from mamba_cli.config import ModelConfig
from mamba_cli.schema import tensor_shapes
from mamba_cli.state import init_state
from mamba_cli.state_format import StateFormat
from mamba_cli.weights import weight_dtype

MATRICES = tuple(f"{name}.weight" for name in ("in_proj", "x_proj", "dt_proj", "out_proj", "fc1", "fc2"))


class Work(NamedTuple):
    """Bytes moved and arithmetic operations."""

    nbytes: int
    operations: int


class WorkCounter:
    """Counts the work of a model of `config` with weights of `dtype` and SSM states of ssm_dtype.

    ssm_dtype: None for fp32, or float64 where the model is; or state_format, of packed states.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        ssm_dtype: torch.dtype | None = None,
        state_format: StateFormat | None = None,
    ):
        shapes = tensor_shapes(config)
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        if not config.tie_embeddings:
            del sizes["backbone.embedding.weight"]
        self.weight_bytes = sum(size * weight_dtype(name, dtype).itemsize for name, size in sizes.items())
        state = init_state(config, 1, dtype, torch.device("meta"), ssm_dtype, state_format)
        self.state_bytes = state.nbytes
        unwritten = sum(packed.nbytes * (1 - 1 / packed.format.window) for packed in state.packed)
        self.step_bytes = 2 * state.nbytes - round(unwritten)
        mamba_layers = config.n_layer - len(config.attn_layer_idx)
        self.token_operations = (
            2 * sum(size for name, size in sizes.items() if name.endswith((*MATRICES, "conv1d.weight")))
            + 5 * mamba_layers * config.d_ssm * config.d_state
        )
        self.head_operations = 2 * config.vocab_rows * config.d_model
        self.key_operations = self.position_bytes = 0
        if config.attention is not None:
            heads, layers = config.attention, len(config.attn_layer_idx)
            self.key_operations = 4 * layers * heads.num_heads * heads.head_dim
            self.position_bytes = 2 * layers * heads.num_heads_kv * heads.head_dim * dtype.itemsize

    def prefill(self, batch: int, tokens: int) -> Work:
        """Return the work of reading `tokens` tokens a sequence, from no state."""
        keys = _keys(0, tokens)
        operations = tokens * self.token_operations + keys * self.key_operations + self.head_operations
        nbytes = self.state_bytes + tokens * self.position_bytes
        return Work(self.weight_bytes + batch * nbytes, batch * operations)

    def decode(self, batch: int, before: int, steps: int) -> Work:
        """Return the work of `steps` steps after `before` tokens of a sequence."""
        keys = _keys(before, steps)
        operations = steps * (self.token_operations + self.head_operations) + keys * self.key_operations
        nbytes = steps * self.step_bytes + (keys + steps) * self.position_bytes
        return Work(steps * self.weight_bytes + batch * nbytes, batch * operations)


def _keys(before: int, tokens: int) -> int:
    """Keys seen by `tokens` queries after `before` tokens: each sees all before it and itself."""
    return tokens * before + tokens * (tokens + 1) // 2
