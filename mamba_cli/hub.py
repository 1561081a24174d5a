"""From what a user calls a model to files on this machine.

Repositories are fetched through huggingface_hub, so HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE
work as everywhere, and a model that is in the cache is used without a network.
"""

import re
import shlex
from pathlib import Path
from typing import NoReturn

from mamba_cli.errors import Mamba2Error
from mamba_cli.files import STATE_SCALES_FILE, STATE_SECTION_FILE
from mamba_cli.storage import shard_names
from mamba_cli.tokenizer import TOKENIZER_FILES

EMBEDDED = "demo"
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


def embedded_model_path() -> Path:
    """Return the folder of the model that comes with the package."""
    return Path(__file__).parent / "demo"


def resolve(model: str | Path, revision: str | None = None) -> Path:
    """Return the folder or file of a model: a path, "demo", or a repo id (owner/name), which is fetched."""
    if str(model) == EMBEDDED:
        if revision is not None:
            raise Mamba2Error(f"revision: expected a repo id to take it of, got the embedded model {model}")
        return embedded_model_path()
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise Mamba2Error(f"revision: expected a repo id to take it of, got the path {path}")
        return path
    if not isinstance(model, str) or not REPO_ID.fullmatch(model):
        raise Mamba2Error(f"model: expected a folder or a repo id (owner/name), got {model}: no such folder")
    return _fetch(model, revision)


def snapshot(repo: str, revision: str | None, names: list[str]) -> Path | None:
    """Return the repo's cached folder with those of `names` that it has; None without network or cache."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=names))
    except LocalEntryNotFoundError:
        # An interrupted download is refused as a whole; which file it lacks is for the caller to say.
        found = try_to_load_from_cache(repo, "config.json", revision=revision)
        return Path(found).parent if isinstance(found, str) else None
    except GatedRepoError as error:
        raise Mamba2Error(
            f"{repo}: expected a repo open to you, got a gated one",
            "accept its terms on the hub, then hf auth login",
        ) from error
    except RepositoryNotFoundError as error:
        raise Mamba2Error(
            f"{repo}: expected a folder here or a repo of the hub, got neither",
            "a private repo needs hf auth login",
        ) from error
    except RevisionNotFoundError as error:
        raise Mamba2Error(f"{repo}: expected a branch, tag or commit, got {revision}") from error
    except (HfHubHTTPError, HFValidationError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise Mamba2Error(f"{repo}: expected it from the hub, got: {first_line}") from error


def _fetch(repo: str, revision: str | None) -> Path:
    """Return the cached folder of a repo with its configuration, tokenizer and weights in it."""
    wanted = ["config.json", "generation_config.json", STATE_SECTION_FILE, STATE_SCALES_FILE]
    wanted += [*INDEXES, *TOKENIZER_FILES]
    folder = snapshot(repo, revision, wanted)
    if folder is None or not (folder / "config.json").exists():
        _missing(repo, revision, "config.json")
    # The rest is of the same commit, even if the branch moves meanwhile.
    commit = folder.name
    index = next((folder / name for name in INDEXES if (folder / name).exists()), None)
    if index is not None:
        shards = shard_names(index)
        snapshot(repo, commit, ["config.json", *shards])
        for shard in shards:
            if not (folder / shard).exists():
                _missing(repo, revision, shard)
        return folder
    for name in SINGLE_FILES:
        snapshot(repo, commit, ["config.json", name])
        if (folder / name).exists():
            return folder
    _missing(repo, revision, SINGLE_FILES[0])


def _missing(repo: str, revision: str | None, name: str) -> NoReturn:
    from huggingface_hub import constants

    command = f"hf download {repo}" + (f" --revision {shlex.quote(revision)}" if revision else "")
    raise Mamba2Error(
        f"{name} of {repo}: expected it in a folder of that name, from the hub or in its cache "
        f"{constants.HF_HUB_CACHE}, got none of these",
        f"without HF_HUB_OFFLINE: {command}" if constants.HF_HUB_OFFLINE else command,
    )
