"""Repositories come from the hub's cache or a server that speaks its protocol on this machine."""

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from checkpoint_testing import save_state_spaces
from mamba_cli.checkpoint import open_checkpoint
from mamba_cli.convert import convert
from mamba_cli.errors import Mamba2Error
from mamba_cli.hub import embedded_model_path, resolve
from model_testing import BASE

REPO = "someone/some-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, no network allowed by the user, and none there for who tries."""

    def refuse(*arguments):
        raise AssertionError("a network was used")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tmp_path / "hub"


def put_in_cache(cache: Path, folder: Path) -> Path:
    """Lay out `folder` as the hub's client does: blobs by hash, a snapshot of links, and a branch."""
    repo = cache / f"models--{REPO.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    for part in (snapshot, repo / "blobs", repo / "refs"):
        part.mkdir(parents=True, exist_ok=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for path in folder.iterdir():
        blob = repo / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def message(*arguments) -> Mamba2Error:
    with pytest.raises(Mamba2Error) as caught:
        open_checkpoint(*arguments)
    return caught.value


def test_cached_model_opens_without_a_network(tmp_path, cache):
    convert(save_state_spaces(tmp_path / "source", BASE), tmp_path / "hf", "hf", max_shard_size="20KB")
    put_in_cache(cache, tmp_path / "hf")
    assert open_checkpoint(REPO).config == BASE
    assert open_checkpoint(REPO, "main").config == BASE
    assert open_checkpoint(REPO, COMMIT).config == BASE
    assert COMMIT not in message(REPO, "v2").message


@pytest.mark.parametrize("lost", ["config.json", "model-00002-of-00005.safetensors"])
def test_file_that_the_cache_lacks_is_named_with_the_command_that_fetches_it(tmp_path, cache, lost):
    convert(save_state_spaces(tmp_path / "source", BASE), tmp_path / "hf", "hf", max_shard_size="20KB")
    (tmp_path / "hf" / lost).unlink()
    put_in_cache(cache, tmp_path / "hf")
    error = message(REPO)
    assert error.message.startswith(f"{lost} of {REPO}: expected it")
    assert error.hint == f"without HF_HUB_OFFLINE: hf download {REPO}"


def test_repo_that_is_not_cached_names_its_first_file_and_the_command(cache):
    error = message(REPO, "v1.0")
    assert error.message.startswith(f"config.json of {REPO}")
    assert str(cache) in error.message
    assert error.hint == f"without HF_HUB_OFFLINE: hf download {REPO} --revision v1.0"


def test_index_in_the_cache_cannot_lead_out_of_it(tmp_path, cache):
    convert(save_state_spaces(tmp_path / "source", BASE), tmp_path / "hf", "hf")
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "model.safetensors")
    snapshot = put_in_cache(cache, tmp_path / "hf")
    outside = os.path.relpath(tmp_path / "model.safetensors", snapshot)
    index = json.dumps({"weight_map": {"backbone.embeddings.weight": outside}})
    (snapshot / "model.safetensors.index.json").write_text(index)
    assert "inside the folder" in message(REPO).message


def test_folder_comes_before_a_repo_of_its_name(tmp_path, cache, monkeypatch):
    save_state_spaces(tmp_path / REPO, BASE)
    monkeypatch.chdir(tmp_path)
    assert resolve(REPO) == Path(REPO)
    assert resolve(tmp_path / REPO) == tmp_path / REPO


@pytest.mark.parametrize("name", ["no-such-folder", "./no/such", "/no/such", "a/b/c", "../a", "a/.."])
def test_what_can_be_no_repo_id_is_a_missing_folder(tmp_path, cache, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert f"got {name}" in message(name).message


def test_a_revision_is_only_a_repos(tmp_path):
    for model in ("demo", str(tmp_path)):
        with pytest.raises(Mamba2Error, match="revision: expected a repo id to take it of, got the "):
            resolve(model, "v1.0")


def test_demo_names_the_embedded_model_even_beside_a_folder_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("demo") == embedded_model_path()
    assert resolve("./demo") == Path("demo")


class Hub(http.server.BaseHTTPRequestHandler):
    """The parts of the hub's protocol that a download uses, for one repo with the files of a folder."""

    folder: Path
    fetched: list[str]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *arguments) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        names = sorted(path.name for path in self.folder.iterdir())
        if path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
            files = [{"rfilename": name} for name in names]
            return self._json({"id": REPO, "sha": COMMIT, "siblings": files})
        if path.startswith(f"/api/models/{REPO}/tree/"):
            sizes = {name: (self.folder / name).stat().st_size for name in names}
            return self._json(
                [{"type": "file", "path": name, "size": sizes[name], "oid": name} for name in names]
            )
        name = path.rpartition("/")[2]
        if path == f"/{REPO}/resolve/{COMMIT}/{name}" and name in names:
            if self.command == "GET":
                self.fetched.append(name)
            return self._send((self.folder / name).read_bytes())
        code = "RepoNotFound" if not path.startswith((f"/{REPO}", f"/api/models/{REPO}")) else "EntryNotFound"
        self._send(b"{}", 404, {"X-Error-Code": code})

    def _json(self, document) -> None:
        self._send(json.dumps(document).encode(), headers={"Content-Type": "application/json"})

    def _send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        etag = hashlib.sha1(body).hexdigest()
        always = {"Content-Length": str(len(body)), "ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        for key, value in (always | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path):
    """A hub with one repo, made of what is in `hub.folder`; `hub.fetched` is what was downloaded."""
    handler = type("Handler", (Hub,), {"folder": tmp_path / "repo", "fetched": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    handler.address = f"http://127.0.0.1:{server.server_port}"
    handler.cache = tmp_path / "home"
    yield handler
    server.shutdown()


def in_a_process(hub, code: str) -> subprocess.CompletedProcess:
    """Run code as a user of this hub: the client reads its environment when it is imported."""
    root = Path(__file__).parent.parent
    paths = [
        str(root),
        str(root / "kernels"),
        str(root / "commands"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment = os.environ | {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(hub.cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_only_what_is_needed_is_fetched_and_safetensors_come_first(tmp_path, hub):
    convert(save_state_spaces(tmp_path / "source", BASE), hub.folder, "hf", max_shard_size="20KB")
    shards = [path.name for path in hub.folder.iterdir()]
    for unneeded in ("pytorch_model.bin", "README.md", "optimizer.pt", "model.fp16.safetensors"):
        (hub.folder / unneeded).write_text("x")
    (hub.folder / "tokenizer.json").write_text("{}")
    done = in_a_process(hub, f"from mamba_cli.hub import resolve; print(resolve('{REPO}'))")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == COMMIT
    assert sorted(hub.fetched) == sorted([*shards, "tokenizer.json"])


def test_model_of_the_hub_converts_like_a_folder_and_stays_cached(tmp_path, hub):
    save_state_spaces(hub.folder, BASE)
    command = f"['convert', '{REPO}', '{tmp_path / 'out'}', '--to', 'hf', '--overwrite']"
    code = f"import sys; from mamba_commands.app import main; sys.exit(main({command}))"
    done = in_a_process(hub, code)
    assert done.returncode == 0, done.stderr
    assert sorted(hub.fetched) == ["config.json", "pytorch_model.bin"]
    original = torch.load(hub.folder / "pytorch_model.bin", weights_only=True)
    opened = open_checkpoint(tmp_path / "out")
    assert all(torch.equal(tensor.load(), original[name]) for name, tensor in opened.tensors.items())
    hub.fetched.clear()
    assert in_a_process(hub, code).returncode == 0
    assert hub.fetched == []


def test_repo_that_the_hub_does_not_have_is_named(hub):
    hub.folder.mkdir()
    code = "import sys; from mamba_commands.app import main; sys.exit(main(['inspect', 'no/such-repo']))"
    done = in_a_process(hub, code)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no/such-repo: expected a folder here or a repo of the hub")
    assert "Traceback" not in done.stderr
