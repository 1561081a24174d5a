"""From a name to a running model."""

import warnings
from pathlib import Path

import torch

from mamba_cli.checkpoint import open_checkpoint
from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error
from mamba_cli.language_model import LanguageModel
from mamba_cli.quantize.saved import read_saved
from mamba_cli.state_format import parse_state_spec
from mamba_cli.tokenizer import load_tokenizer
from mamba_cli.weights import Weights, random_tensors

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def load_model(
    model: str | Path,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    backend: str = "auto",
    tokenizer: str | None = None,
    state_dtype: str | None = None,
) -> LanguageModel:
    """Load a checkpoint of any known format.

    model: folder, file or hub repo id; device: "auto" (a GPU where there is one), "cpu", "cuda" or
    "cuda:1"; dtype: a name of DTYPES, or "auto" for the one the matrices are stored in (fp32 for
    float16 on a CPU, which has no fast float16); backend: "auto", "torch" or "triton"; tokenizer: a
    folder or repo id to take the tokenizer from; state_dtype: how SSM states are kept, in the words of
    --state-dtype, by default as the checkpoint says, or in fp32 where it says nothing. Raises
    Mamba2Error where any of it cannot be had.
    """
    checkpoint = open_checkpoint(str(model), revision=revision)
    for note in checkpoint.notes:
        warnings.warn(f"{model}: {note}", stacklevel=2)
    target = choose_device(device)
    stored = checkpoint.tensors["backbone.embedding.weight"].dtype
    weights = Weights(
        lambda name: checkpoint.tensors[name].load(),
        set(checkpoint.tensors),
        target,
        choose_dtype(dtype, stored, target),
    )
    lm = LanguageModel(
        checkpoint.config,
        weights,
        name=str(model),
        backend=backend,
        load_tokenizer=lambda: load_tokenizer(checkpoint, tokenizer),
    )
    if state_dtype is not None and parse_state_spec(state_dtype).plain is not None:
        return lm.with_state(state_dtype)  # what the checkpoint says of its state matters to none of it
    saved = read_saved(checkpoint)
    columns = saved[1].columns if saved and saved[1].outer else None
    if state_dtype is not None:
        return lm.with_state(state_dtype, columns)
    return lm.with_state(saved[0], columns, saved[1].conv) if saved else lm


def random_model(
    config: ModelConfig,
    device: str = "auto",
    dtype: str = "float32",
    backend: str = "auto",
    seed: int = 0,
    on_device: bool = False,
) -> LanguageModel:
    """Return a model of random weights, for measuring and testing.

    A seed gives the same weights for every device, unless they are made on_device, which is quicker.
    """
    target = choose_device(device)
    tensors = random_tensors(config, seed, target if on_device else "cpu")
    # Each tensor is asked for once: taken out, its fp32 original goes as soon as it is cast.
    weights = Weights(tensors.pop, set(tensors), target, choose_dtype(dtype, torch.float32, target))
    return LanguageModel(config, weights, name="random", backend=backend)


def choose_device(name: str) -> torch.device:
    """Return the device that `name` means: "auto", "cpu", "cuda" or "cuda:N"."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise Mamba2Error(f"device: expected auto, cpu, cuda or cuda:N, got {name}")
    # torch wraps numbers past 127 to negative ones.
    if device.type == "cuda" and not 0 <= (device.index or 0) < torch.cuda.device_count():
        count = torch.cuda.device_count()
        found = f"{count} CUDA device{'s' * (count > 1)}" if count else "no CUDA device"
        raise Mamba2Error(f"device {name}: expected one that torch finds, got {found}")
    return device


def choose_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: `name`, or for "auto" the stored one where the device is fast in it."""
    if name == "auto":
        if stored == torch.float16 and device.type == "cpu":
            return torch.float32
        return stored if stored in DTYPES.values() else torch.bfloat16
    if name not in DTYPES:
        raise Mamba2Error(f"dtype: expected auto or one of {', '.join(DTYPES)}, got {name}")
    return DTYPES[name]
