"""A pool on a real S3 server, which runs in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sigmerge
from tests.pools import PoolOnDisk, make_pool

DOMAINS = ("math", "coding", "safety")
SCORES: dict[str, Any] = {
    "experts": {e: {d: 0.9 if d == e else 0.4 for d in DOMAINS} for e in DOMAINS},
    "anchor": {"math": 0.5, "coding": 0.8, "safety": 0.6},
}
SERVER = """
from werkzeug.serving import make_server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
app = DomainDispatcherApplication(create_backend_app)
server = make_server("127.0.0.1", 0, app, threaded=True)
print("port", server.port, flush=True)
server.serve_forever()
"""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@dataclass(frozen=True)
class Remote:
    """The pool on the disk, and the same pool in a bucket."""

    local: PoolOnDisk
    bucket: Any
    url: str = "s3://models"

    def recipe(self, method: str = "ties", **sections: Any) -> dict[str, Any]:
        """A recipe of the local pool, and with the addresses of the remote one."""
        text = json.dumps(self.local.recipe(method, **sections))
        for folder in (self.local.reference, *self.local.experts.values()):
            text = text.replace(f'"{folder}"', f'"{self.url}/pool/{folder.name}"')
        return dict(json.loads(text))

    def objects(self, folder: str) -> dict[str, bytes]:
        prefix = f"models/{folder}/"
        self.bucket.invalidate_cache()
        return {name.removeprefix(prefix): self.bucket.cat_file(name)
                for name in self.bucket.find(prefix)}  # fmt: skip


def weights(content: dict[str, bytes]) -> dict[str, bytes]:
    kinds = (".safetensors", "index.json", "config.json", "tokenizer.json")
    return {name: data for name, data in content.items() if name.endswith(kinds)}


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture(scope="package")
def server() -> Iterator[None]:
    """An S3 server, where the environment says that S3 is."""
    command = [sys.executable, "-c", SERVER]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    patch = pytest.MonkeyPatch()
    try:
        assert running.stdout is not None
        port = re.search(rb"port (\d+)", running.stdout.readline())
        assert port is not None
        settings = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(port[1])}",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
        for name, value in {**settings, **CREDENTIALS}.items():
            patch.setenv(name, value)
        yield
    finally:
        patch.undo()
        running.kill()
        running.wait()


@pytest.fixture(scope="package")
def remote(server: None, tmp_path_factory: pytest.TempPathFactory) -> Remote:
    import fsspec

    root = tmp_path_factory.mktemp("storage")
    made = make_pool(root, layers=3, dtype="bf16", shards=(1, 2, 1, 3), spread=0.002,
                     tokenizer=True)  # fmt: skip
    (root / "scores.json").write_text(json.dumps(SCORES))
    sigmerge.merge(made.recipe("linear"), root / "anchor", max_shard_size="12KB")
    bucket = fsspec.filesystem("s3")
    bucket.mkdir("models")
    for folder in ("reference", *DOMAINS, "anchor"):
        for name, content in files(root / folder).items():
            bucket.pipe_file(f"models/pool/{folder}/{name}", content)
    return Remote(made, bucket)
