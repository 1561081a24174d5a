"""A layer's recurrent state in few bits, and the window of its last inputs that is kept exactly.

A state that is rounded at every token drifts. Here the stored state is that of some tokens ago. The inputs
x, B and dt since then are kept as they were, and a step computes with both:

    h_t = exp(A sum dt) stored + sum over the window of exp(A (dt after i)) dt_i x_i B_i

Once in `window` tokens a head's window is folded into its stored state, which is rounded then, and is empty
again. Head h does so at token t where (t + h) % window == window - 1: each step writes its share of heads.

Heads may be kept in different formats, see `state_codes`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property

import torch

from mamba_kernels.backend import backend_for
from mamba_kernels.checks import check, check_shape
from mamba_kernels.state_codes import (
    FORMATS,
    ROUNDINGS,
    STATE_DTYPES,
    decode,
    encode,
    rounding_keys,
)

__all__ = [
    "ROUNDINGS", "STATE_DTYPES", "HeadGroup", "LayerFormat", "PackedState", "advance_positions",
    "empty_packed_state",
]  # fmt: skip

# Segments of codes begin on what a thread loads at once.
ALIGNMENT = 16


@dataclass(frozen=True)
class HeadGroup:
    """Heads of one format, whose segments of codes follow each other: `size` bytes each, from `begin` on."""

    dtype: str
    heads: tuple[int, ...]
    begin: int
    size: int

    @property
    def end(self) -> int:
        return self.begin + self.size * len(self.heads)


@dataclass(frozen=True)
class LayerFormat:
    """How one layer keeps its state.

    heads: the format of each head, of STATE_DTYPES; Mamba-1 has one head, of d_inner rows.
    rounding: of ROUNDINGS. window: tokens between two writes of a head's state; 1 writes at every token.
    seed: of the stochastic rounding, in 32 bits; another for each layer.
    """

    heads: tuple[str, ...]
    rounding: str = "stochastic"
    window: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check(len(self.heads) > 0, "heads", "a format for each head", self.heads)
        for dtype in self.heads:
            check(dtype in STATE_DTYPES, "heads", f"formats of {', '.join(STATE_DTYPES)}", repr(dtype))
        check(self.rounding in ROUNDINGS, "rounding", " or ".join(ROUNDINGS), repr(self.rounding))
        check(self.window >= 1, "window", "at least 1 token", self.window)

    @property
    def kinds(self) -> int:
        """Bit i is set where a head has format i of STATE_DTYPES."""
        return sum(1 << STATE_DTYPES.index(dtype) for dtype in set(self.heads))

    def groups(self, headdim: int, d_state: int) -> list[HeadGroup]:
        """Where the codes of each head lie in a sequence's bytes: heads of one format are neighbours."""
        groups, begin = [], 0
        for dtype in STATE_DTYPES:
            heads = tuple(head for head, own in enumerate(self.heads) if own == dtype)
            if heads:
                size = -(-headdim * FORMATS[dtype].words(d_state) * 4 // ALIGNMENT) * ALIGNMENT
                groups.append(HeadGroup(dtype, heads, begin, size))
                begin = groups[-1].end
        return groups


@dataclass
class PackedState:
    """Memory of one layer for a batch of sequences, each in a slot.

    codes: (slots, bytes of a sequence) uint8, see `LayerFormat.groups` and `state_codes`.
    scales: (slots, nheads, headdim) float32, of rows; not used by fp32 and bf16 heads.
    x: (slots, window, nheads, headdim), B: (slots, window, ngroups, d_state), in the activations' dtype, and
    dt: (slots, window, nheads), for Mamba-1 (slots, window, d_inner), float32 (float64 beside float64), after
    softplus and clamp: the last inputs, that of token t at t % window. dt is 0 where there is none.
    position: (slots,) int32, the tokens read so far.
    columns: (nheads, d_state) float32, a static factor of each column of a scaled head, or None.
    """

    format: LayerFormat
    codes: torch.Tensor
    scales: torch.Tensor
    x: torch.Tensor
    B: torch.Tensor
    dt: torch.Tensor
    position: torch.Tensor
    columns: torch.Tensor | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that differs between sequences; axis 0 is the slot."""
        for each in fields(self):
            if each.name not in ("format", "columns"):
                yield getattr(self, each.name)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PackedState":
        """A state of `change` of each of `tensors`; of slices of slots, a view."""
        changed = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("codes", "scales", "x", "B", "dt", "position"):
            changed[name] = change(changed[name])
        return PackedState(**changed)

    @property
    def slots(self) -> int:
        return self.codes.shape[0]

    @property
    def headdim(self) -> int:
        return self.x.shape[-1]

    @property
    def d_state(self) -> int:
        return self.B.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of `tensors`."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @cached_property
    def groups(self) -> list[HeadGroup]:
        return self.format.groups(self.headdim, self.d_state)

    @cached_property
    def work(self) -> dict[str, object]:
        """Work areas of kernels, by name, which hold nothing from one token to the next."""
        return {}

    def words(self, group: HeadGroup) -> torch.Tensor:
        """The codes of a group, a view (slots, heads of the group, headdim, words of a row) in int32."""
        row = FORMATS[group.dtype].words(self.d_state)
        heads = self.codes[:, group.begin : group.end].view(torch.int32).unflatten(1, (len(group.heads), -1))
        return heads[..., : self.headdim * row].unflatten(-1, (self.headdim, row))

    def window(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The inputs that the stored states of `slots` (batch,) lack: x, B and dt, the newest first.

        Axis 1 is the age, and dt is 0 where a head's state has that input already.
        """
        window, nheads = self.format.window, self.scales.shape[1]
        position = self.position[slots].long()
        age = torch.arange(window, device=slots.device)
        ring = (position[:, None] - 1 - age) % window
        at = (slots[:, None], ring)
        count = (position[:, None] + torch.arange(nheads, device=slots.device)) % window
        dt = torch.where(age[:, None] < count[:, None, :], self.dt[at], 0.0)
        return self.x[at], self.B[at], dt

    def stored(self, slots: torch.Tensor) -> torch.Tensor:
        """The stored states of `slots` (batch,) without their windows, float32 (batch, nheads, headdim,
        d_state)."""
        scales = self.scales[slots]
        parts = []
        for group in self.groups:
            heads = slice(None) if len(self.groups) == 1 else list(group.heads)
            part = decode(self.words(group)[slots], scales[:, heads], group.dtype, self.d_state)
            if self.columns is not None and FORMATS[group.dtype].largest is not None:
                part = part * self.columns[heads, None, :]
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        order = torch.tensor([head for group in self.groups for head in group.heads]).argsort()
        return torch.cat(parts, 1)[:, order.to(slots.device)]

    def store(
        self, state: torch.Tensor, slots: torch.Tensor, heads: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Round state (pairs, headdim, d_state), float32, into head heads[i] of slot slots[i].

        tokens: (pairs,) the number of the last token in each state, which the rounding is drawn for.
        """
        keys = None
        if self.format.rounding == "stochastic":
            keys = rounding_keys(self.format.seed, tokens, heads)
        for group in self.groups:
            place = torch.full((len(self.format.heads),), -1, device=heads.device)
            place[list(group.heads)] = torch.arange(len(group.heads), device=heads.device)
            own = slice(None) if len(self.groups) == 1 else (place[heads] >= 0).nonzero().squeeze(1)
            part, slot, head = state[own], slots[own], heads[own]
            if self.columns is not None and FORMATS[group.dtype].largest is not None:
                part = part * self.columns[head, None, :].reciprocal()
            words, scales = encode(part, group.dtype, None if keys is None else keys[own])
            self.words(group)[slot, place[head]] = words
            if scales is not None:
                self.scales[slot, head] = scales

    def unpack(self, A: torch.Tensor) -> torch.Tensor:
        """The states with their windows folded in, float32 (slots, nheads, headdim, d_state).

        A: (nheads,), or (d_inner, d_state) for Mamba-1; negative.
        """
        check_shape("A", A, (self.headdim, self.d_state) if A.dim() == 2 else (self.scales.shape[1],))
        if A.dim() == 1 and self.x.dtype != torch.float64 and backend_for(self.codes.device) == "triton":
            from mamba_kernels.packed_state_triton import launch_unpack

            return launch_unpack(self, A)
        slots = torch.arange(self.slots, device=self.codes.device)
        state = self.stored(slots)
        x, B, dt = self.window(slots)
        for age in reversed(range(self.format.window)):
            state = recur(state, x[:, age], B[:, age], dt[:, age], A)
        return state.float()

    def pack_(self, state: torch.Tensor, position: int | torch.Tensor) -> None:
        """Take over `state` (slots, nheads, headdim, d_state) after `position` tokens, in place.

        position: a number, or one for each slot (slots,).
        """
        nheads = self.scales.shape[1]
        check_shape("state", state, (self.slots, nheads, self.headdim, self.d_state))
        if isinstance(position, torch.Tensor):
            check_shape("position", position, (self.slots,))
            self.position.copy_(position)
        else:
            self.position.fill_(position)
        for past in (self.x, self.B, self.dt):
            past.zero_()  # each, as 0 times an infinity that a former sequence has left would not be 0
        if backend_for(self.codes.device) == "triton":
            from mamba_kernels.packed_state_triton import launch_pack

            launch_pack(state, self)
            return
        slots = torch.arange(self.slots, device=self.codes.device).repeat_interleave(nheads)
        heads = torch.arange(nheads, device=self.codes.device).repeat(self.slots)
        self.store(state.float().flatten(0, 1), slots, heads, self.position[slots] - 1)


def recur(
    state: torch.Tensor, x: torch.Tensor, B: torch.Tensor, dt: torch.Tensor, A: torch.Tensor
) -> torch.Tensor:
    """One token of the recurrence, exp(dt A) state + dt x B.

    state: (batch, nheads, headdim, d_state). x: (batch, nheads, headdim). B: (batch, ngroups, d_state).
    dt: (batch, nheads) with A (nheads,), or (batch, headdim) with A (headdim, d_state).
    """
    wide = torch.promote_types(dt.dtype, A.dtype)
    B = B.to(wide).repeat_interleave(state.shape[1] // B.shape[1], 1)[:, :, None, :]
    dt = dt.to(wide)
    if A.dim() == 1:
        dt, A = dt[..., None, None], A[:, None, None]
    else:
        dt = dt[:, None, :, None]
    return state * torch.exp(dt * A) + dt * x.to(wide)[..., None] * B


def empty_packed_state(
    format: LayerFormat,
    slots: int,
    nheads: int,
    headdim: int,
    d_state: int,
    ngroups: int,
    dtype: torch.dtype,
    device: torch.device,
    columns: torch.Tensor | None = None,
    dt_per_row: bool = False,
) -> PackedState:
    """The state before any token.

    dtype: of the activations. dt_per_row: each row has a dt of its own, as in Mamba-1, where nheads is 1.
    columns: (nheads, d_state) factors of columns, positive; see `PackedState`.
    """
    check(len(format.heads) == nheads, "format", f"{nheads} heads", len(format.heads))
    check(not dt_per_row or nheads == 1, "nheads", "1 where each row has its dt", nheads)
    check_shape("columns", columns, (nheads, d_state))

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(slots, *shape, dtype=dtype, device=device)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return PackedState(
        format,
        zeros(format.groups(headdim, d_state)[-1].end, dtype=torch.uint8),
        zeros(nheads, headdim),
        zeros(format.window, nheads, headdim, dtype=dtype),
        zeros(format.window, ngroups, d_state, dtype=dtype),
        zeros(format.window, headdim if dt_per_row else nheads, dtype=wide),
        zeros(dtype=torch.int32),
        None if columns is None else columns.to(device, torch.float32),
    )


@cache
def head_table(format: LayerFormat, headdim: int, d_state: int, device: torch.device) -> torch.Tensor:
    """(nheads, 2) int32: each head's index in STATE_DTYPES, and where its codes begin in units of 16 bytes.

    Made once, as a CUDA graph cannot make it, and kept for good, as the graph goes on reading it.
    """
    rows = {}
    for group in format.groups(headdim, d_state):
        for index, head in enumerate(group.heads):
            rows[head] = (STATE_DTYPES.index(group.dtype), (group.begin + index * group.size) // ALIGNMENT)
    return torch.tensor([rows[head] for head in sorted(rows)], dtype=torch.int32, device=device)


def advance_positions(states: Sequence[PackedState], state_batch_indices: torch.Tensor | None = None) -> None:
    """Count the token that every layer has read, once the step is over.

    state_batch_indices: the slots that the step advanced, negative for none; by default all.
    """
    positions = [state.position for state in states]
    if not positions:
        return
    if state_batch_indices is None:
        torch._foreach_add_(positions, 1)
        return
    live = (state_batch_indices >= 0).int()
    slots = state_batch_indices.clamp(min=0).long()
    for position in positions:
        position.index_add_(0, slots, live)
