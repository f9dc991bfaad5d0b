"""Names of the Hub in place of paths, with the Hub's own library: what its cache has, and a Hub of a few files on this machine."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from streamrl.config.hub import from_hub
from streamrl.config.load import load
from streamrl.data.rows import open_rows
from streamrl.errors import ConfigError
from tests.support.errors import raises

REVISION = "0123456789abcdef0123456789abcdef01234567"
ROW = b'{"prompt": "1+1=", "label": "2"}\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache, empty; the Hub itself cannot be reached."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put(cache: Path, folder: str, files: dict[str, bytes]) -> Path:
    """A repository in the cache as the Hub's library keeps it: files are links to blobs without a suffix."""
    snapshot = cache / folder / "snapshots" / REVISION
    (cache / folder / "refs").mkdir(parents=True)
    (cache / folder / "refs" / "main").write_text(REVISION)
    (cache / folder / "blobs").mkdir()
    for number, (name, content) in enumerate(files.items()):
        blob = cache / folder / "blobs" / f"{number:064x}"
        blob.write_bytes(content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    return snapshot


MODEL = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b""}


def test_a_model_of_the_cache(cache: Path, tmp_path: Path) -> None:
    snapshot = put(cache, "models--Qwen--Qwen3-0.6B", MODEL)
    assert from_hub({"model": {"path": "Qwen/Qwen3-0.6B"}}, tmp_path) == {"model": {"path": str(snapshot)}}
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert from_hub({"model": {"path": "Qwen/Qwen3-0.6B"}}, tmp_path) == {"model": {"path": "Qwen/Qwen3-0.6B"}}, "a folder goes before it"


def test_a_part_of_a_model_is_none(cache: Path, tmp_path: Path) -> None:
    shards = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    put(
        cache, "models--a--whole", {**MODEL, "model.safetensors.index.json": shards, "model-1.safetensors": b"", "model-2.safetensors": b""}
    )
    put(cache, "models--a--part", {**MODEL, "model.safetensors.index.json": shards, "model-1.safetensors": b""})
    from_hub({"model": {"path": "a/whole"}}, tmp_path)
    with raises(ConfigError, key="model.path", got="a/part") as refusal:
        from_hub({"model": {"path": "a/part"}}, tmp_path)
    assert "hf download a/part" in refusal.value.hint


@pytest.mark.parametrize(
    ("files", "name", "key", "expected"),
    [
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"], "a/b", "train", "data/train*.jsonl"),
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"], "a/b", "heldout", "data/test*.jsonl"),
        (["train.jsonl", "README.md"], "a/b@[0:1]", "train", "train*.jsonl@[0:1]"),
        (["main/train.jsonl", "socratic/train.jsonl"], "hf://datasets/a/b/main/train*.jsonl", "train", "main/train*.jsonl"),
        (["main/train.jsonl", "socratic/train.jsonl"], "hf://datasets/a/b/socratic/train.jsonl", "train", "socratic/train.jsonl"),
    ],
)
def test_rows_of_the_cache(cache: Path, tmp_path: Path, files: list[str], name: str, key: str, expected: str) -> None:
    snapshot = put(cache, "datasets--a--b", dict.fromkeys(files, ROW))
    (tmp_path / "x.toml").write_text(f'[run]\nname = "x"\n[data]\n{key} = "{name}"\n' + ('train = "x.toml"\n' if key == "heldout" else ""))
    found = getattr(load(tmp_path / "x.toml").data, key)
    assert found == f"{snapshot.resolve()}/{expected}"
    assert list(open_rows(found)) == [json.loads(ROW)]


@pytest.mark.parametrize("files", [["main/train.jsonl", "socratic/train.jsonl"], ["test.jsonl"], ["README.md"]])
def test_rows_that_are_not_one_set_are_refused(cache: Path, tmp_path: Path, files: list[str]) -> None:
    put(cache, "datasets--a--b", dict.fromkeys(files, ROW))
    with raises(ConfigError, key="data.train", got="a/b"):
        from_hub({"data": {"train": "a/b"}}, tmp_path)


@pytest.mark.parametrize("text", ["data/rows.jsonl", "rows.jsonl", "/a/b", "./a/b", "~/a/b", "a/b/c", ""])
def test_what_can_only_be_a_path_is_one(cache: Path, tmp_path: Path, text: str) -> None:
    tree = {
        "model": {"path": text if not text.endswith("jsonl") else ""},
        "data": {"train": text, "sources": [{"train": text}], "heldout": 3},
    }
    assert from_hub(json.loads(json.dumps(tree)), tmp_path) == tree


DATASET = {
    "data/train-00000-of-00001.jsonl": b'{"prompt": "x", "label": "1"}\n',
    "data/test-00000-of-00001.jsonl": b"{}\n",
    "README.md": b"x",
}
FILES = MODEL | {name.rpartition("/")[2]: content for name, content in DATASET.items()}


class Hub(http.server.BaseHTTPRequestHandler):
    """The few addresses of the Hub that its library asks for: what a repository has, and its files."""

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        if self.path.startswith("/api/"):
            files = DATASET if "/datasets/" in self.path else {**MODEL, "model.bin": b"x"}
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            told = {
                "id": "a/b",
                "modelId": "a/b",
                "sha": REVISION,
                "siblings": siblings,
                "tags": [],
                "private": False,
                "downloads": 0,
                "likes": 0,
            }
            tree = [{"type": "file", "path": one["rfilename"], "size": one["size"], "oid": "0" * 40} for one in siblings]
            self._answer(json.dumps(tree if "/tree/" in self.path else told).encode())
        else:
            self._answer(FILES[self.path.rpartition("/")[2]])

    def _answer(self, body: bytes) -> None:
        size = len(FILES.get(self.path.rpartition("/")[2], body))
        self.send_response(200)
        for name, value in (("ETag", '"' + "e" * 40 + '"'), ("X-Repo-Commit", REVISION), ("Content-Length", str(size))):
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.process
def test_what_the_cache_lacks_is_fetched_and_said(hub: str, tmp_path: Path) -> None:
    """In a process of its own: the library reads the Hub's address when it is imported."""
    program = "import sys, pathlib; from streamrl.config.hub import from_hub as at; "
    program += "found = at({'model': {'path': 'a/b'}, 'data': {'train': 'c/d'}}, pathlib.Path('.')); "
    program += "print(found['model']['path'], found['data']['train'], sep='\\n')"
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": ":".join(sys.path),
    }
    environment.pop("HF_HUB_OFFLINE", None)
    for again in (False, True):
        done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        folder, rows = map(Path, done.stdout.split())
        assert {file.name for file in folder.iterdir()} == set(MODEL), "and no other weights"
        [file] = rows.parent.glob(rows.name)
        assert (file.name, *os.listdir(rows.parent)) == ("train-00000-of-00001.jsonl",) * 2, "and no other split"
        told = [line for line in done.stderr.splitlines() if line.startswith("fetching")]
        assert [("3 files" in line, "1 files" in line, "a/b" in line, "c/d" in line) for line in told] == (
            [] if again else [(True, False, True, False), (False, True, False, True)]
        )
