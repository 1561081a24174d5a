"""Files of a text data set on the Hugging Face hub: found by their names, cached, offline when cached."""

import re
from dataclasses import dataclass
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
        listing = _list(repo, revision)
        files = [file for file in listing.files if file.endswith(_SUFFIXES)]
        chosen = choose_files(repo, files, wanted) if files else []
        if chosen:
            _refuse_missing_shards(repo, chosen)
            return [_local_copy(repo, file, listing) for file in chosen]
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


def _refuse_missing_shards(repo: str, files: list[str]) -> None:
    """Raise Mamba2Error where names say "-of-00002" and one is not there: half a text is another text."""
    for file in files:
        shards = re.search(r"-(\d{5})-of-(\d{5})\.", file)
        if shards and int(shards[2]) != len(files):
            raise Mamba2Error(
                f"data set {repo}: expected all {int(shards[2])} files like {file}, got {len(files)}",
                hint=f"hf download --repo-type dataset {repo}",
            )


@dataclass(frozen=True)
class _Listing:
    """A data set's files; their commit on the hub, or without a network the cached folder they are in."""

    files: list[str]
    commit: str | None = None
    folder: Path | None = None


def _list(repo: str, revision: str) -> _Listing:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        # One request without retries, so that no network is noticed at once.
        info = huggingface_hub.HfApi().dataset_info(repo, revision=revision, timeout=10)
        return _Listing([sibling.rfilename for sibling in info.siblings or []], commit=info.sha)
    except errors.RevisionNotFoundError:
        return _Listing([])
    except errors.GatedRepoError:
        raise Mamba2Error(
            f"data set {repo}: expected one open to you, got a gated one",
            hint=f"accept its terms at https://huggingface.co/datasets/{repo}, then hf auth login",
        ) from None
    except errors.RepositoryNotFoundError:
        raise Mamba2Error(
            f"data set {repo}: expected a file here or a data set of the hub, got neither",
            hint="a private one needs hf auth login",
        ) from None
    except Exception as error:  # offline mode, no network, or a failing server: each has its own class
        reason = type(error).__name__
    try:
        cached = huggingface_hub.snapshot_download(
            repo, repo_type="dataset", revision=revision, local_files_only=True
        )
    except errors.LocalEntryNotFoundError:
        if revision != CONVERTED:
            return _Listing([])
        raise Mamba2Error(
            f"data set {repo}: expected it in the cache or a network, or a file of that name, got none of "
            f"these ({reason})",
            hint=f"with a network: hf download --repo-type dataset {repo}",
        ) from None
    folder = Path(cached)
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return _Listing(files, folder=folder)


def _local_copy(repo: str, file: str, listing: _Listing) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    if listing.folder:
        return listing.folder / file
    try:
        return Path(huggingface_hub.hf_hub_download(repo, file, repo_type="dataset", revision=listing.commit))
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise Mamba2Error(
            f"data set {repo}: expected to fetch {file}, got {type(error).__name__}",
            hint=f"hf download --repo-type dataset {repo} {file}",
        ) from None
