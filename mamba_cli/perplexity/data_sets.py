"""Files of a text data set on the Hugging Face hub: found by their names, cached, offline when cached."""

import re
from pathlib import Path, PurePosixPath

from mamba_cli.errors import Mamba2Error

# The hub keeps a copy of every public data set as parquet, one folder a configuration, on this branch.
CONVERTED = "refs/convert/parquet"
_SUFFIXES = (".parquet", ".jsonl", ".txt")
# Splits in order of preference when none is asked for, and the words that mean them in a path.
_SPLITS = {"test": ("test",), "validation": ("validation", "valid", "val", "dev"), "train": ("train",)}


def data_set_files(name: str) -> list[Path]:
    """Return local copies of the files of owner/name[:config][:split], in order.

    They come from the branch main, or where that holds no file of this kind, from the hub's own
    conversion. Nothing is fetched that is in the cache already; with HF_HUB_OFFLINE, or without a
    network, the cache alone is used.
    """
    repo, *wanted = name.split(":")
    for revision in ("main", CONVERTED):
        files = [file for file in _list_files(repo, revision) if file.endswith(_SUFFIXES)]
        chosen = choose_files(repo, files, wanted) if files else []
        if chosen:
            return [_fetch(repo, file, revision) for file in chosen]
    asked = ":".join(wanted) or "a split"
    raise Mamba2Error(f"data set {repo}: expected {', '.join(_SUFFIXES)} files of {asked}, got none")


def choose_files(repo: str, files: list[str], wanted: list[str]) -> list[str]:
    """Return the files of one configuration and split, sorted; none where there is no such split.

    wanted: [], [config], [split] or [config, split]. A configuration is a folder, or for files that
    are in none (or in "data") the one configuration "default".
    """
    configs = sorted({_config(file) for file in files})
    config = split = None
    if len(wanted) == 2:
        config, split = wanted
    elif wanted:
        config, split = (wanted[0], None) if wanted[0] in configs else (None, wanted[0])
    if config is None:
        if len(configs) > 1 and "default" not in configs:
            raise Mamba2Error(
                f"data set {repo}: expected one of its configurations, got none",
                hint=f"{repo}:CONFIG with CONFIG one of {', '.join(configs)}",
            )
        config = configs[0] if len(configs) == 1 else "default"
    files = [file for file in files if _config(file) == config]
    for candidate in [split] if split else _SPLITS:
        words = _SPLITS.get(candidate, (candidate,))
        found = sorted(file for file in files if _has_word(file, words))
        if found:
            # The same rows may be there as parquet and as text; take one kind.
            kind = min((PurePosixPath(file).suffix for file in found), key=_SUFFIXES.index)
            return [file for file in found if file.endswith(kind)]
    return []


def _config(file: str) -> str:
    folders = PurePosixPath(file).parts[:-1]
    return folders[0] if folders and folders[0] != "data" else "default"


def _has_word(file: str, words: tuple[str, ...]) -> bool:
    """Tell whether the path below the configuration's folder names one of these splits."""
    parts = PurePosixPath(file).parts
    inside = parts[1:] if len(parts) > 1 else parts
    return not set(words).isdisjoint(re.split(r"[^a-zA-Z0-9]+", "/".join(inside)))


def _list_files(repo: str, revision: str) -> list[str]:
    """Return the files of the data set, or offline those of it that are in the cache."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return huggingface_hub.HfApi().list_repo_files(repo, repo_type="dataset", revision=revision)
    except errors.RevisionNotFoundError:
        return []
    except errors.GatedRepoError:
        raise Mamba2Error(
            f"data set {repo}: expected access to it, got refused",
            hint=f"ask for access at https://huggingface.co/datasets/{repo} and set HF_TOKEN",
        ) from None
    except errors.RepositoryNotFoundError:
        raise Mamba2Error(
            f"data set {repo}: expected one on the hub, got not found",
            hint="a private one needs HF_TOKEN",
        ) from None
    except Exception as error:  # offline mode, no network, or a failing server: each has its own class
        reason = error
    try:
        folder = huggingface_hub.snapshot_download(
            repo, repo_type="dataset", revision=revision, local_files_only=True
        )
    except errors.LocalEntryNotFoundError:
        if revision == "main":
            return []
        raise Mamba2Error(
            f"data set {repo}: expected it in the cache or a network, got neither ({type(reason).__name__})",
            hint=f"with a network: hf download --repo-type dataset {repo}",
        ) from None
    root = Path(folder)
    return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]


def _fetch(repo: str, file: str, revision: str) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.hf_hub_download(repo, file, repo_type="dataset", revision=revision))
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise Mamba2Error(
            f"data set {repo}: expected to fetch {file}, got {type(error).__name__}",
            hint=f"hf download --repo-type dataset {repo} {file}",
        ) from None
