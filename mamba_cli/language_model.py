"""The Python door: a loaded model with its tokenizer, `prefill` and `step`."""

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from mamba_cli.attention import AttentionMixer
from mamba_cli.config import ModelConfig
from mamba_cli.conv_window import RANGES, static_scales
from mamba_cli.errors import Mamba2Error
from mamba_cli.model import Model
from mamba_cli.state import State, init_state, wide_dtype
from mamba_cli.state_format import PLAIN_NAMES, StateFormat, half_lives, parse_state_spec, recommended_format
from mamba_cli.step_graph import PrefillGraphs, StepGraph
from mamba_cli.tokenizer import Tokenizer
from mamba_cli.weights import Weights
from mamba_kernels.backend import backend_for, use_backend

# Tokens that go through the layers at once: it bounds the memory that activations take, and on a
# CPU keeps them in the cache.
BLOCK_TOKENS = {"cpu": 512, "cuda": 8192}
# A GPU takes more of a narrow model, whose kernels are too short for it: up to 4 times as many tokens,
# as long as what a layer's widest projection writes stays below this.
BLOCK_BYTES = 256 * 2**20

Ids = torch.Tensor | Sequence[Sequence[int]]


class LanguageModel:
    """A Mamba language model ready to run.

    Token ids are integers below config.vocab_rows; logits have one column for each embedding row,
    padding included, and come in the model's dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        name: str = "",
        backend: str = "auto",
        load_tokenizer: Callable[[], Tokenizer] | None = None,
        ssm_dtype: torch.dtype | None = None,
    ):
        self.config = config
        self.name = name
        self.device = weights.device
        self.dtype = weights.dtype
        self.ssm_dtype = ssm_dtype  # of plain SSM states; None for fp32, or float64 where the model is
        self.state_format: StateFormat | None = None  # of packed SSM states; None for plain ones
        self.columns: Sequence[torch.Tensor | None] | None = None  # static scales of packed states
        self.conv_scales: Sequence[torch.Tensor | None] | None = None  # and of convolution windows
        self._load_tokenizer = load_tokenizer
        self.backend = _resolve_backend(backend, self.device, self.dtype)
        self.model = Model(config, weights)
        self._forget_graphs()

    def with_state(
        self,
        state: str | StateFormat,
        columns: Sequence[torch.Tensor | None] | None = None,
        conv_peaks: Sequence[torch.Tensor | None] | None = None,
    ) -> "LanguageModel":
        """Return the same model, sharing its weights, with its SSM states kept otherwise.

        state: words as --state-dtype takes them (fp32: float64 in a float64 model), or a format. columns:
        of each layer, the calibrated static scales (nheads, d_state), or None; words that do not ask for
        them leave them out. conv_peaks: the largest magnitudes (conv_dim,) that go into each layer's
        convolution, for windows in fp8 or int8. A state of one of the two models is none of the other.
        """
        lm = copy.copy(self)
        lm.ssm_dtype = lm.state_format = lm.columns = lm.conv_scales = None
        if isinstance(state, StateFormat):
            lm.state_format = state
        else:
            spec = parse_state_spec(state)
            columns = columns if spec.outer else None
            if spec.outer and columns is None:
                raise Mamba2Error(
                    f"state-dtype {spec}: expected calibrated column scales, got none",
                    "mamba2 quantize-state calibrates them",
                )
            if spec.plain is None:
                lm.state_format = recommended_format(self.config, self.half_lives(), spec)
            elif spec.plain != torch.float32:
                lm.ssm_dtype = spec.plain
        if columns is not None:
            lm.columns = [None if scales is None else scales.to(self.device) for scales in columns]
        if lm.state_format is not None and lm.state_format.conv in RANGES:
            if conv_peaks is None:
                raise Mamba2Error(
                    f"state format {lm.state_dtype}: expected calibrated scales of the convolution, got none",
                    "mamba2 quantize-state calibrates them",
                )
            lm.conv_scales = [
                None if peaks is None else static_scales(lm.state_format.conv, peaks.to(self.device))
                for peaks in conv_peaks
            ]
        lm._forget_graphs()
        return lm

    @property
    def state_dtype(self) -> str:
        """How the SSM states are kept, in the words of --state-dtype ("fp64" in a float64 model)."""
        if self.state_format is not None:
            return self.state_format.name
        return PLAIN_NAMES[self.ssm_dtype or wide_dtype(self.dtype)]

    @property
    def captures(self) -> bool:
        """Whether prompts and steps go into CUDA graphs. A packed state waits for the device in torch.

        Torch looks up which heads fold; the kernels find it in the state's position on the device.
        """
        in_torch = self.backend == "torch" and self.state_format is not None
        return self.device.type == "cuda" and not in_torch

    def half_lives(self) -> list[torch.Tensor | None]:
        """Return for each layer how long its states last (see state_format.half_lives); None: attention."""
        mixers = [block.mixer for block in self.model.blocks]
        return [
            None
            if isinstance(mixer, AttentionMixer)
            else half_lives((-mixer.A).log(), mixer.dt_bias, self.config.dt_limit).cpu()
            for mixer in mixers
        ]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, read at first use."""
        if self._load_tokenizer is None:
            raise Mamba2Error(f"tokenizer: expected one for {self.name or 'this model'}, got none")
        return self._load_tokenizer()

    @torch.inference_mode()
    def __call__(self, input_ids: Ids) -> torch.Tensor:
        """Return logits (batch, seqlen, vocab_rows) of input_ids (batch, seqlen), from no state."""
        return self.logits(self.hidden_states(input_ids)[0])

    @torch.inference_mode()
    def prefill(self, input_ids: Ids, state: State | None = None) -> tuple[torch.Tensor, State]:
        """Read input_ids (batch, seqlen >= 1) after `state`.

        Returns the last position's logits (batch, vocab_rows) and the state after it; the state that
        was passed in is left as it was. prefill(a + b) equals prefill(b, prefill(a)).
        """
        input_ids = self._ids(input_ids)
        state = self._own_state(input_ids, state)
        for block in self._blocks(input_ids):
            hidden = self._run(self._prefill, block, state)[:, -1]
        return self.logits(hidden), state

    @torch.inference_mode()
    def step(self, token_ids: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Read one token a sequence, token_ids (batch,).

        Returns logits (batch, vocab_rows) and the state after it; `state` is left as it was. A loop
        that needs no old state is faster with `step_`.
        """
        state = state.clone()
        token_ids = token_ids.to(self.device)
        return self.logits(self._run(self.model.step, token_ids, state)), state

    @torch.inference_mode()
    def step_(self, token_ids: torch.Tensor, state: State) -> torch.Tensor:
        """Read one token a sequence, token_ids (batch,); update `state` in place; return logits.

        On a GPU the first call on a state captures a CUDA graph, which all later ones replay.
        """
        token_ids = token_ids.to(self.device)
        if not self.captures:
            return self.logits(self._run(self.model.step, token_ids, state))
        if state.graph is None:
            state.graph = self._run(StepGraph, self.model, state)
        return state.graph(token_ids).clone()

    @torch.inference_mode()
    def hidden_states(self, input_ids: Ids, state: State | None = None) -> tuple[torch.Tensor, State]:
        """Return what the head reads at every position (batch, seqlen, d_model), and the new state."""
        input_ids = self._ids(input_ids)
        state = self._own_state(input_ids, state)
        hidden = [self._run(self._prefill, block, state) for block in self._blocks(input_ids)]
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden, 1), state

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (..., vocab_rows) of hidden states (..., d_model)."""
        return self.model.head(hidden)

    def init_state(self, batch: int) -> State:
        """Return the state before any token."""
        return init_state(
            self.config,
            batch,
            self.dtype,
            self.device,
            self.ssm_dtype,
            self.state_format,
            self.columns,
            self.conv_scales,
        )

    def release_graphs(self) -> None:
        """Free the memory of the CUDA graphs that earlier calls left; the next calls capture anew."""
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        self.decoder: Any = None  # what mamba_cli.decoding keeps from one text to the next
        self._prefill = PrefillGraphs(self.model) if self.captures else self.model.prefill

    def _run(self, function, *arguments) -> torch.Tensor:
        with use_backend(self.backend):
            return function(*arguments)

    def _own_state(self, input_ids: torch.Tensor, state: State | None) -> State:
        if state is None:
            return self.init_state(input_ids.shape[0])
        if state.batch != input_ids.shape[0]:
            raise Mamba2Error(f"state: expected batch {input_ids.shape[0]}, got {state.batch}")
        return state.clone()

    def _blocks(self, input_ids: torch.Tensor) -> Sequence[torch.Tensor]:
        return input_ids.split(max(1, self._block_tokens() // input_ids.shape[0]), dim=1)

    def _block_tokens(self) -> int:
        tokens = BLOCK_TOKENS[self.device.type]
        if self.device.type == "cuda":
            token_bytes = max(self.config.in_proj_dim, 2 * self.config.mlp_dim) * self.dtype.itemsize
            while 2 * tokens * token_bytes <= BLOCK_BYTES and tokens < 4 * BLOCK_TOKENS["cuda"]:
                tokens *= 2
        return tokens

    def _ids(self, input_ids: Ids) -> torch.Tensor:
        ids = torch.as_tensor(input_ids)
        if ids.dim() != 2 or 0 in ids.shape or ids.is_floating_point():
            raise Mamba2Error(
                f"input_ids: expected integers (batch, seqlen >= 1), got {ids.dtype} {tuple(ids.shape)}"
            )
        low, high = ids.min().item(), ids.max().item()
        if low < 0 or high >= self.config.vocab_rows:
            raise Mamba2Error(
                f"input_ids: expected ids in [0, {self.config.vocab_rows}), got {low if low < 0 else high}"
            )
        return ids.to(self.device)


def _resolve_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    if name == "auto" and dtype == torch.float64:
        name = "torch"  # the kernels compute in float32
    try:
        with use_backend(name):
            return backend_for(device)
    except ValueError as error:
        raise Mamba2Error(str(error)) from error
    except RuntimeError as error:
        raise Mamba2Error(str(error), "--backend torch runs on every device") from error
