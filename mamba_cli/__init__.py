"""The library behind the `mamba2` command: `from mamba_cli import load_model`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mamba_cli.language_model import LanguageModel
    from mamba_cli.load import load_model

__all__ = ["LanguageModel", "load_model"]


def __getattr__(name: str):
    # Imported at first use, so that a command's --help does not wait for torch.
    if name == "load_model":
        from mamba_cli.load import load_model

        return load_model
    if name == "LanguageModel":
        from mamba_cli.language_model import LanguageModel

        return LanguageModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
