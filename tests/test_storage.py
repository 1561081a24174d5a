"""Weights are untrusted: what is not whole, or not only weights, is refused in one line."""

import json
import os
import pickle
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from mamba_cli import storage
from mamba_cli.errors import Mamba2Error
from mamba_cli.files import inside
from mamba_cli.storage import StoredTensor, open_tensors, open_weights
from mamba_cli.writing import parse_size, write_pickle, write_safetensors

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
    "c": torch.ones(4, 1, 2, dtype=torch.float16),
}


class SideEffect:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def stored(tensors=TENSORS):
    return [
        StoredTensor(name, tuple(tensor.shape), tensor.dtype, lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    ]


def message(function, *arguments) -> str:
    with pytest.raises(Mamba2Error) as caught:
        function(*arguments)
    assert "\n" not in caught.value.message
    return caught.value.message


def with_header(path, header: bytes, data: bytes = b"", length: int | None = None):
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> bytes:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize("save_as", ["x.safetensors", "x.bin"])
def test_tensors_are_read_with_their_bits(tmp_path, save_as):
    path = tmp_path / save_as
    save_file(TENSORS, path) if path.suffix == ".safetensors" else torch.save(TENSORS, path)
    found = open_tensors(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].shape == tuple(tensor.shape)
        assert found[name].nbytes == tensor.nbytes
        assert storage.same_bits(found[name].load(), tensor)


def test_pickle_mapped_anew_between_tensors_gives_the_same_values(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "MAPPED_BYTES", 0)
    torch.save(TENSORS, tmp_path / "x.bin")
    found = open_tensors(tmp_path / "x.bin")
    for _ in range(2):
        assert all(storage.same_bits(found[name].load(), tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_file_that_stands_for_weights_is_named_as_what_it_is(tmp_path, name):
    path = tmp_path / name
    assert "no such file" in message(open_tensors, path)
    path.write_bytes(b"")
    assert "an empty file" in message(open_tensors, path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "Git-LFS pointer" in message(open_tensors, path)
    path.unlink()
    path.mkdir()
    assert "a folder" in message(open_tensors, path)


@pytest.mark.parametrize("change", [-1, 1])
def test_safetensors_cut_or_grown_by_a_byte_says_both_sizes(tmp_path, change):
    whole = save(TENSORS)
    path = tmp_path / "x.safetensors"
    path.write_bytes(whole[:change] if change < 0 else whole + b"x")
    said = message(open_tensors, path)
    assert f"expected {len(whole)} bytes" in said and f"got {len(whole) + change}" in said


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**6, 0])
def test_safetensors_header_length_is_not_believed(tmp_path, length):
    path = with_header(tmp_path / "x.safetensors", entry(), bytes(8), length)
    assert str(length) in message(open_tensors, path)


@pytest.mark.parametrize(
    "header",
    [
        entry(offsets=(0, 2**60)),
        entry(offsets=(8, 16)),
        entry(offsets=(-8, 0)),
        entry(offsets=(0, 4)),
        entry(offsets=(0,)),
        entry(shape=(2**40,), offsets=(0, 2**42)),
        entry(shape=(-2,)),
        entry(shape=("2",)),
        entry(dtype="F4"),
        entry(dtype=["F32"]),
        b'{"a": 1}',
        b"[1]",
        b"{",
        b'{"a":' + b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_safetensors_header_that_contradicts_the_file_is_refused(tmp_path, header):
    message(open_tensors, with_header(tmp_path / "x.safetensors", header, bytes(8)))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_are_refused_in_one_line(tmp_path_factory, noise, at):
    whole = save(TENSORS)
    path = tmp_path_factory.mktemp("noise") / "x.safetensors"
    path.write_bytes(whole[:at] + noise + whole[at + len(noise) + 1 :])
    message(open_tensors, path)


@pytest.mark.parametrize("archive", [True, False], ids=["torch.save", "pickle"])
def test_pickle_with_a_side_effect_is_not_run(tmp_path, archive):
    marker, path = tmp_path / "ran", tmp_path / "x.bin"
    contents = {"a": torch.ones(2), "b": SideEffect(marker)}
    if archive:
        torch.save(contents, path)
    else:
        path.write_bytes(pickle.dumps(contents))
    said = message(open_tensors, path)
    assert not marker.exists()
    assert ("mkdir" in said) if archive else ("plain pickle" in said)


@pytest.mark.parametrize(
    "contents",
    [
        [torch.ones(2)],
        {"model": {"a": torch.ones(2)}},
        {"a": torch.ones(1).expand(10**6, 10**6)},
        {"a": torch.eye(2).to_sparse()},
        {"a": torch.ones(2, device="meta")},
    ],
    ids=["list", "nested", "larger_than_the_file", "sparse", "meta"],
)
def test_pickle_of_anything_but_dense_tensors_by_name_is_refused(tmp_path, contents):
    torch.save(contents, tmp_path / "x.bin")
    message(open_tensors, tmp_path / "x.bin")


@pytest.mark.parametrize("keep", [-1, -30, 200, 20, 3])
def test_pickle_cut_short_is_refused(tmp_path, keep):
    path = tmp_path / "x.bin"
    torch.save(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    message(open_tensors, path)


def test_pickle_with_packed_records_is_refused(tmp_path):
    torch.save({"a": torch.zeros(10**6)}, tmp_path / "plain.bin")
    with (
        zipfile.ZipFile(tmp_path / "plain.bin") as plain,
        zipfile.ZipFile(tmp_path / "x.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert "packed" in message(open_tensors, tmp_path / "x.bin")


@pytest.fixture
def sharded(tmp_path):
    """A folder of two shards and their index, with a file outside that it has no business with."""
    save_file(TENSORS, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": TENSORS["a"]}, folder / "one.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "two.safetensors")
    write_index(folder, a="one.safetensors", b="two.safetensors")
    return folder


def write_index(folder, **weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_as_one(sharded):
    assert open_weights(sharded).keys() == {"a", "b"}


def test_missing_shard_is_named(sharded):
    (sharded / "two.safetensors").unlink()
    assert "two.safetensors" in message(open_weights, sharded)


def test_tensor_in_two_shards_is_named(sharded):
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, sharded / "two.safetensors")
    assert "got a a second time" in message(open_weights, sharded)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "x/../../outside.safetensors", "a\0"]
)
def test_index_that_names_a_file_outside_is_refused(sharded, name):
    write_index(sharded, a=name)
    assert "inside the folder" in message(open_weights, sharded) or "\0" in name
    message(open_weights, sharded)


@pytest.mark.parametrize("name", ["one.safetensors", "model.safetensors", "pytorch_model.bin"])
def test_link_to_a_file_outside_is_refused(sharded, name):
    if name != "one.safetensors":
        (sharded / "model.safetensors.index.json").unlink()
    (sharded / name).unlink(missing_ok=True)
    (sharded / name).symlink_to(sharded.parent / "outside.safetensors")
    assert "inside the folder" in message(open_weights, sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}, "x"])
def test_index_without_shards_is_refused(sharded, weight_map):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "weight_map" in message(open_weights, sharded)


def test_link_into_the_blobs_of_the_hub_cache_belongs(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(TENSORS, blobs / "4567")
    (snapshot / "model.safetensors").symlink_to("../../blobs/4567")
    assert open_weights(snapshot).keys() == TENSORS.keys()
    (snapshot / "config.json").symlink_to("../../../elsewhere")
    message(inside, snapshot, "config.json")


def test_safetensors_are_written_as_the_library_reads_them(tmp_path):
    write_safetensors(tmp_path, stored(), 10**9, lambda nbytes: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert list(found) == list(TENSORS)
    assert all(storage.same_bits(found[name], tensor) for name, tensor in TENSORS.items())


def test_shards_keep_to_their_size_but_for_one_larger_tensor(tmp_path):
    tensors = {name: torch.ones(size) for name, size in zip("abcde", (2, 2, 9, 1, 1), strict=True)}
    written = []
    write_safetensors(tmp_path, stored(tensors), 4 * 4, written.append)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = {"a": 1, "b": 1, "c": 2, "d": 3, "e": 3}
    names = {name: f"model-{shard:05d}-of-00003.safetensors" for name, shard in shards.items()}
    assert index == {"metadata": {"total_size": 60}, "weight_map": names}
    assert open_weights(tmp_path).keys() == tensors.keys()
    assert sum(written) == 60


@pytest.mark.parametrize("large_from", [1 << 30, 4], ids=["plain", "zip64"])
def test_pickle_is_written_as_torch_and_zip_read_it(tmp_path, monkeypatch, large_from):
    monkeypatch.setattr("mamba_cli.writing.ZIP64_FROM", large_from)
    path = tmp_path / "x.bin"
    views = TENSORS | {"part": torch.arange(100.0)[50:60], "turned": torch.ones(2, 3).T}
    write_pickle(path, stored(views), {"tied": "a"}, lambda nbytes: None)
    assert zipfile.ZipFile(path).testzip() is None
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert list(found) == [*views, "tied"]
        assert all(storage.same_bits(found[name], tensor) for name, tensor in views.items())
        assert found["tied"].data_ptr() == found["a"].data_ptr()
        assert all(found[name].data_ptr() % 64 == 0 for name in views)
        assert found["part"].untyped_storage().nbytes() in (40, path.stat().st_size)


def test_tensor_that_changed_since_its_header_was_read_is_not_written(tmp_path):
    changed = [StoredTensor("a", (3,), torch.float32, lambda: torch.ones(2))]
    with pytest.raises(Mamba2Error, match="changed meanwhile"):
        write_safetensors(tmp_path, changed, 10**9, lambda nbytes: None)


def test_sizes_are_read_in_the_units_people_write():
    sizes = {"5GB": 5 * 10**9, "500 mb": 5 * 10**8, "1.5KiB": 1536, "1000": 1000, "7B": 7}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GB", "1.2.3GB", "-5GB", "5TBs", "0", "inf"):
        message(parse_size, text)
