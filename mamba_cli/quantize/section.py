"""A StateFormat as JSON: the `state_quantization` section of a checkpoint, and what --recipe reads.

    {"version": 1, "name": "int8", "rounding": "stochastic", "window": 8, "seed": 0, "conv": "auto",
     "outer": false, "layers": ["int8", null, {"dtype": "int8", "except": {"fp16": [0, 17]}}],
     "scales": "state_scales.safetensors"}

A layer is the dtype of all its heads, or the commonest with the heads that differ; null is attention. A
layer of Mamba-1 counts as one head. "outer" says that there are column scales, "scales" where they are.
A section is untrusted: it has to fit the model exactly, and a key that is not known is refused.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error
from mamba_cli.files import STATE_SCALES_FILE
from mamba_cli.state_format import CONV_FORMATS, LARGEST_WINDOW, StateFormat, layer_seed
from mamba_kernels.packed_state import ROUNDINGS, STATE_DTYPES, LayerFormat

VERSION = 1
KEYS = ("version", "name", "rounding", "window", "seed", "conv", "outer", "layers", "scales")
NEEDED = ("version", "name", "rounding", "window", "layers")

LARGEST_SEED = 2**31 - 1
LONGEST_NAME = 80


def write_section(format: StateFormat, outer: bool = False) -> dict[str, Any]:
    """Return the section that read_section makes `format` of again."""
    found = {
        (layer.rounding, layer.window, layer.seed - layer_seed(0, index))
        for index, layer in enumerate(format.layers)
        if layer is not None
    }
    if len(found) != 1:
        raise Mamba2Error(f"state format: expected one rounding, window and seed, got {len(found)} of them")
    rounding, window, seed = found.pop()
    return {
        "version": VERSION,
        "name": format.name,
        "rounding": rounding,
        "window": window,
        "seed": seed,
        "conv": format.conv,
        "outer": outer,
        "layers": [None if layer is None else write_heads(layer.heads) for layer in format.layers],
        "scales": STATE_SCALES_FILE,
    }


def write_heads(heads: tuple[str, ...]) -> str | dict[str, Any]:
    """Return the dtypes of one layer's heads as the section says them."""
    commonest = Counter(heads).most_common(1)[0][0]
    others: dict[str, list[int]] = {}
    for head, dtype in enumerate(heads):
        if dtype != commonest:
            others.setdefault(dtype, []).append(head)
    return {"dtype": commonest, "except": others} if others else commonest


def describe(format: StateFormat, outer: bool) -> dict[str, str]:
    """Say in words how a state is kept: the rounding, how often it is written, and the heads by dtype."""
    layers = [layer for layer in format.layers if layer is not None]
    window = layers[0].window
    words = {
        "rounding": layers[0].rounding,
        "written": f"every {window} tokens" if window > 1 else "at every token",
        "heads": describe_heads([dtype for layer in layers for dtype in layer.heads]),
    }
    if outer:
        words["column scales"] = "static"
    if format.conv != "auto":
        words["convolution"] = format.conv
    return words


def describe_heads(heads: Sequence[str]) -> str:
    """Say how many heads are kept in which dtype: "int8 x 70, fp16 x 10"."""
    counts = Counter(heads).most_common()
    return ", ".join(f"{dtype} x {count}" for dtype, count in counts) if len(counts) > 1 else heads[0]


def read_section(section: Any, config: ModelConfig, where: str) -> tuple[StateFormat, bool]:
    """Return the format for a model of `config`, and whether column scales belong to it.

    where: the file and key, for messages. Raises Mamba2Error where the section does not say everything,
    says anything else, or does not fit the model.
    """
    check = _Checker(where)
    # The version first: another one may have other keys.
    version = section.get("version", VERSION) if isinstance(section, dict) else VERSION
    if version != VERSION or type(version) is not int:
        raise Mamba2Error(
            f"{where}: expected version {VERSION}, got {version!r:.40}", "a newer mamba2 may read it"
        )
    section = check.object("", section, KEYS, NEEDED)
    name = section["name"]
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        check.fail("name", f"a line of up to {LONGEST_NAME} characters", name)
    if name == "fp32":
        check.fail("name", "another name than that of the plain state", name)
    rounding = check.word("rounding", section["rounding"], ROUNDINGS)
    window = check.integer("window", section["window"], 1, LARGEST_WINDOW)
    seed = check.integer("seed", section.get("seed", 0), 0, LARGEST_SEED)
    conv = check.word("conv", section.get("conv", "auto"), CONV_FORMATS)
    outer = section.get("outer", False)
    if not isinstance(outer, bool):
        check.fail("outer", "true or false", outer)
    if section.get("scales") not in (None, STATE_SCALES_FILE):
        check.fail("scales", f"null or {STATE_SCALES_FILE}", section["scales"])
    layers = section["layers"]
    if not isinstance(layers, list) or len(layers) != config.n_layer:
        found = f"{len(layers)} of them" if isinstance(layers, list) else layers
        check.fail("layers", f"a list of the model's {config.n_layer} layers", found)
    if len(set(config.attn_layer_idx)) == config.n_layer:
        check.fail("layers", "a model with a layer that has a state", "attention alone")
    heads = [
        _read_layer(check, f"layers[{index}]", layer, index, config) for index, layer in enumerate(layers)
    ]
    formats = tuple(
        None if of_layer is None else LayerFormat(of_layer, rounding, window, layer_seed(seed, index))
        for index, of_layer in enumerate(heads)
    )
    return StateFormat(layers=formats, conv=conv, name=name), outer


def state_heads(config: ModelConfig) -> int:
    """Return the number of heads that a layer's state has formats of: one for Mamba-1."""
    return config.nheads if config.layer == "Mamba2" else 1


def _read_layer(
    check: "_Checker", key: str, layer: Any, index: int, config: ModelConfig
) -> tuple[str, ...] | None:
    if index in config.attn_layer_idx:
        if layer is not None:
            check.fail(key, "null for an attention layer", layer)
        return None
    count = state_heads(config)
    if isinstance(layer, str):
        return (check.word(key, layer, STATE_DTYPES),) * count
    layer = check.object(key, layer, ("dtype", "except"), ("dtype", "except"))
    heads = [check.word(f"{key}.dtype", layer["dtype"], STATE_DTYPES)] * count
    others = check.object(f"{key}.except", layer["except"], STATE_DTYPES, ())
    taken: set[int] = set()
    for dtype, numbers in others.items():
        if not isinstance(numbers, list) or len(numbers) > count:
            check.fail(f"{key}.except.{dtype}", f"a list of at most {count} heads", numbers)
        for number in numbers:
            head = check.integer(f"{key}.except.{dtype}", number, 0, count - 1)
            if head in taken:
                check.fail(f"{key}.except.{dtype}", "each head once", head)
            taken.add(head)
            heads[head] = dtype
    return tuple(heads)


class _Checker:
    """Raises Mamba2Error that names the file, the key, what was expected and what was found."""

    def __init__(self, where: str):
        self.where = where

    def fail(self, key: str, expected: str, found: object) -> None:
        name = f"{self.where} {key}".rstrip()
        raise Mamba2Error(f"{name}: expected {expected}, got {_short(found)}")

    def word(self, key: str, value: Any, words: tuple[str, ...]) -> str:
        if not isinstance(value, str) or value not in words:
            self.fail(key, f"one of {', '.join(words)}", value)
        return value

    def integer(self, key: str, value: Any, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            self.fail(key, f"an integer from {low} to {high}", value)
        return value

    def object(self, key: str, value: Any, known: tuple[str, ...], needed: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(key, "an object", value)
        for name in value:
            if name not in known:
                self.fail(key, f"only the keys {', '.join(known)}", name)
        for name in needed:
            if name not in value:
                self.fail(f"{key}.{name}".lstrip("."), "a value", "no such key")
        return value


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
