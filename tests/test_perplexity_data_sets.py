"""Data sets of the hub: which files a name means, and what works offline."""

from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import errors

from mamba_cli.errors import Mamba2Error
from mamba_cli.perplexity.data_sets import choose_files
from mamba_cli.perplexity.texts import read_text

CONFIGS = ["a/test-00000-of-00002.parquet", "a/test-00001-of-00002.parquet", "a/train-0.parquet"]
BOTH = [*CONFIGS, "b/test/0000.parquet", "b/validation/0000.parquet"]
LATEST = ["data/attestation.jsonl", "data/dev.jsonl", "data/train.jsonl"]


@pytest.mark.parametrize(
    ("files", "wanted", "chosen"),
    [
        (BOTH, ["a", "test"], CONFIGS[:2]),
        (BOTH, ["a"], CONFIGS[:2]),
        (BOTH, ["b", "validation"], ["b/validation/0000.parquet"]),
        (BOTH, ["b", "other"], []),
        (CONFIGS, [], CONFIGS[:2]),
        (CONFIGS, ["train"], ["a/train-0.parquet"]),
        (LATEST, [], ["data/dev.jsonl"]),  # "attestation" is no test split
        (LATEST, ["default", "train"], ["data/train.jsonl"]),
        (["test.txt", "test.jsonl"], [], ["test.jsonl"]),
        (["default/test/0.parquet", "de/test/0.parquet"], [], ["default/test/0.parquet"]),
        (["test_data/train.parquet"], [], ["test_data/train.parquet"]),
    ],
)
def test_configuration_and_split_choose_the_files(files, wanted, chosen):
    assert choose_files("owner/name", files, wanted) == chosen


def test_a_configuration_is_asked_for_where_there_are_several():
    with pytest.raises(Mamba2Error, match="expected one of its configurations") as error:
        choose_files("owner/name", BOTH, [])
    assert "a, b" in error.value.hint


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return a function that puts a data set into an empty, offline hub cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    original = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *args, **kwargs: original(*args, cache_dir=tmp_path, **kwargs),
    )

    def add(repo: str, revision: str = "main", **files: list[str]) -> None:
        folder = tmp_path / f"datasets--{repo.replace('/', '--')}"
        commit = "0123456789abcdef0123456789abcdef01234567"
        (folder / "refs" / revision).parent.mkdir(parents=True)
        (folder / "refs" / revision).write_text(commit)
        for name, rows in files.items():
            path = folder / "snapshots" / commit / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path)

    return add


def test_a_cached_data_set_is_read_offline(cache):
    cache(
        "Salesforce/wikitext",
        **{"wikitext-2-raw-v1/test-00000-of-00001.parquet": ["", " = A = \n", " b . \n"]},
    )
    text = read_text("wikitext")
    assert text.documents(False) == ["\n\n = A = \n\n\n b . \n"]
    assert len(text.documents(True)) == 1
    assert read_text("Salesforce/wikitext:wikitext-2-raw-v1:test").rows == text.rows


def test_the_hubs_own_conversion_serves_where_the_repository_has_no_text_files(cache):
    cache("owner/name", "refs/convert/parquet", **{"default/test/0000.parquet": ["one", "two"]})
    assert read_text("owner/name").rows == ["one", "two"]


@pytest.mark.parametrize("name", ["wikitext", "lambada", "owner/name:config:test"])
def test_offline_and_not_cached_names_the_command_that_fetches_it(cache, name):
    with pytest.raises(
        Mamba2Error, match="in the cache or a network, or a file of that name, got none"
    ) as error:
        read_text(name)
    assert "hf download --repo-type dataset" in error.value.hint


def test_half_a_cached_split_is_not_taken_for_the_whole(cache):
    cache("owner/name", **{"data/test-00000-of-00002.parquet": ["one"]})
    with pytest.raises(Mamba2Error, match=r"expected all 2 files like .*, got 1"):
        read_text("owner/name")


def test_files_are_fetched_by_the_commit_that_was_listed(monkeypatch, tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "two"}')
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    siblings = [SimpleNamespace(rfilename=name) for name in ("test-b.jsonl", "test-a.jsonl", "train.jsonl")]
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "dataset_info",
        lambda self, repo, revision, timeout: SimpleNamespace(siblings=siblings, sha="abc"),
    )
    fetched = []

    def download(repo, file, repo_type, revision):
        fetched.append((repo, file, repo_type, revision))
        return str(tmp_path / file.removeprefix("test-"))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert read_text("owner/name:test").rows == ["one", "two"]
    assert fetched == [("owner/name", f"test-{name}.jsonl", "dataset", "abc") for name in "ab"]


def test_a_split_that_is_not_there_is_an_error(monkeypatch):
    def listed(self, repo, revision, timeout):
        files = ["README.md", "a/train.parquet"] if revision == "main" else []
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files], sha="abc")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", listed)
    with pytest.raises(Mamba2Error, match="files of a:test, got none"):
        read_text("owner/name:a:test")


def test_a_repository_that_does_not_exist_is_an_error(monkeypatch):
    def missing(*args, **kwargs):
        raise errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", missing)
    with pytest.raises(
        Mamba2Error, match="data set owner/name: expected a file here or a data set of the hub, got neither"
    ):
        read_text("owner/name")
