"""A server that speaks the hub's protocol as huggingface_hub uses it, over folders on the disk.

Reading: the information of a model, its tree, `resolve` with a redirect to large files, ETags and
ranges. Writing: `preupload`, the batch call of Git LFS, the upload of objects, commits. It notes
every request and the bytes that it answered with.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

LARGE = (".safetensors", ".bin")
"""Files that are stored as Git LFS objects."""
TOKEN = "hf_of_the_owner"
READ_TOKEN = "hf_that_may_read"


@dataclass
class Model:
    """A model: its commits by name, each the content of every file."""

    commits: dict[str, dict[str, bytes]]
    gated: bool = False
    private: bool = False
    branch: str = ""

    @property
    def head(self) -> str:
        return self.branch or next(reversed(self.commits))


@dataclass
class Hub:
    """The hub: its models by id, its large objects by digest, and what was asked of it."""

    url: str = ""
    models: dict[str, Model] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    """Method, path, and bytes of the answer's body."""
    ends_after: int | None = None
    """Bytes of a large file after which the connection ends, once."""

    @property
    def storage(self) -> str:
        """Where large objects lie: on another host, as of the hub."""
        return self.url.replace("127.0.0.1", "localhost")

    def add(self, name: str, folder: Path, **how: Any) -> str:
        """A model whose only commit has the files of a folder; the commit."""
        files = {
            file.relative_to(folder).as_posix(): file.read_bytes()
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        return self.commit(name, files, **how)

    def commit(self, name: str, files: dict[str, bytes], **how: Any) -> str:
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        known = self.models.setdefault(name, Model({}, **how))
        known.commits[sha] = files
        known.branch = sha
        self.objects |= {_sha256(data): data for n, data in files.items() if n.endswith(LARGE)}
        return sha

    def sent(self, ending: str = "") -> int:
        """Bytes of bodies that were sent for paths with this ending; large files by their names."""
        return sum(n for method, path, n in self.requests
                   if method == "GET" and path.endswith(ending))  # fmt: skip


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def _answer(self, how: Any) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.content = self.rfile.read(length)
        place = urlparse(self.path)
        try:
            how(unquote(place.path).strip("/").split("/"), parse_qs(place.query))
        except _Refused as refused:
            body = json.dumps({"error": refused.message or refused.code}).encode()
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self._send(refused.status, body, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str], of: str = "") -> None:
        self.hub.requests.append((self.command, of or urlparse(self.path).path, len(body)))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, content: Any, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    @property
    def token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def _model(self, name: str, revision: str = "main") -> tuple[str, dict[str, bytes]]:
        model = self.hub.models.get(name)
        if model is None or (model.private and self.token != TOKEN):
            raise _Refused(404 if self.token else 401, "RepoNotFound", "Repository not found")
        sha = model.head if revision == "main" else revision
        if sha not in model.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, model.commits[sha]

    def _get(self, parts: list[str], query: dict[str, list[str]]) -> None:
        if parts == ["api", "whoami-v2"]:
            if self.token not in (TOKEN, READ_TOKEN):
                raise _Refused(401, "", "Invalid credentials in Authorization header")
            role = "read" if self.token == READ_TOKEN else "write"
            token = {"accessToken": {"role": role}}
            self._json({"name": "owner", "orgs": [{"name": "group"}], "auth": token})
        elif parts[:2] == ["api", "models"]:
            self._information(parts[2:], query)
        elif parts[0] == "lfs":
            self._large(parts[1])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            raise _Refused(404, "", f"no such page: {self.path}")

    def _information(self, parts: list[str], query: dict[str, list[str]]) -> None:
        name, rest = "/".join(parts[:2]), parts[2:]
        sha, files = self._model(name, rest[1] if len(rest) > 1 else "main")
        if rest[:1] == ["tree"]:
            self._json([_listed(n, data) for n, data in files.items()])
            return
        model = self.hub.models[name]
        siblings = []
        for n, data in files.items():
            entry: dict[str, Any] = {"rfilename": n}
            if "blobs" in query:
                entry |= {"size": len(data), "blobId": _blob(data)}
                if n.endswith(LARGE):
                    entry["lfs"] = {"sha256": _sha256(data), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        self._json({
            "id": name, "modelId": name, "sha": sha, "siblings": siblings, "tags": [],
            "private": model.private, "gated": "auto" if model.gated else False,
        })  # fmt: skip

    def _resolve(self, name: str, revision: str, file: str) -> None:
        sha, files = self._model(name, revision)
        if self.hub.models[name].gated and self.token != TOKEN:
            raise _Refused(403 if self.token else 401, "GatedRepo", "Access is restricted")
        if file not in files:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        data, commit = files[file], {"X-Repo-Commit": sha}
        if file.endswith(LARGE):
            digest = _sha256(data)
            self._send(302, b"", {
                **commit, "Location": f"{self.hub.storage}/lfs/{digest}",
                "X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(data)),
            }, of=f"/{name}/{file}")  # fmt: skip
        else:
            self._ranged(data, {**commit, "ETag": f'"{_blob(data)}"'}, f"/{name}/{file}")

    def _large(self, digest: str) -> None:
        data = self.hub.objects[digest]
        named = next((f"/{model}/{n}" for model, one in self.hub.models.items()
                      for files in one.commits.values() for n, d in files.items() if d == data),
                     f"/lfs/{digest}")  # fmt: skip
        self._ranged(data, {"ETag": f'"{digest}"'}, named)

    def _ranged(self, data: bytes, headers: dict[str, str], of: str) -> None:
        asked = self.headers.get("Range")
        body, status = data, 200
        if asked and self.command == "GET":
            first, _, last = asked.removeprefix("bytes=").partition("-")
            body = data[int(first) : int(last) + 1 if last else None]
            end = int(first) + len(body) - 1
            headers = {**headers, "Content-Range": f"bytes {first}-{end}/{len(data)}"}
            status = 206
        ends = self.hub.ends_after
        if ends is not None and self.command == "GET" and len(body) > ends:
            self.hub.ends_after = None
            self.hub.requests.append((self.command, of, ends))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:ends])
            self.close_connection = True
            return
        self._send(status, body, {**headers, "Accept-Ranges": "bytes"}, of)

    def _post(self, parts: list[str], query: dict[str, list[str]]) -> None:
        if parts[:2] == ["api", "validate-yaml"]:
            self._json({"warnings": [], "errors": []})
            return
        if parts[:2] == ["api", "models"] and parts[4:5] == ["paths-info"]:
            _, files = self._model("/".join(parts[2:4]), parts[5])
            asked = (
                parse_qs(self.content.decode()).get("paths") or json.loads(self.content)["paths"]
            )
            self._json([_listed(n, files[n]) for n in asked if n in files])
            return
        if self.token != TOKEN:
            raise _Refused(403, "", "You need a token that may write")
        given = json.loads(self.content) if parts[-2:-1] != ["commit"] else None
        if parts == ["api", "repos", "create"]:
            name = f"{given['organization'] or 'owner'}/{given['name']}"
            if name in self.hub.models:
                self._json({"error": "exists", "url": f"{self.hub.url}/{name}"}, 409)
                return
            private = given.get("private") or given.get("visibility") == "private"
            self.hub.commit(name, {}, private=bool(private))
            self._json({"url": f"{self.hub.url}/{name}", "name": name})
        elif parts[4:5] == ["preupload"]:
            self._json({"files": [
                {"path": one["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular"}
                for one in given["files"]
            ]})  # fmt: skip
        elif parts[-2:] == ["objects", "batch"]:
            self._json({"transfer": "basic", "objects": [
                {"oid": one["oid"], "size": one["size"]} | (
                    {} if one["oid"] in self.hub.objects else
                    {"actions": {"upload": {"href": f"{self.hub.url}/put/{one['oid']}"}}})
                for one in given["objects"]
            ]})  # fmt: skip
        elif parts[4:5] == ["commit"]:
            self._commit("/".join(parts[2:4]))
        else:
            raise _Refused(404, "", f"no such page: {self.path}")

    def _commit(self, name: str) -> None:
        _, files = self._model(name)
        made = dict(files)
        for line in self.content.splitlines():
            one = json.loads(line)
            value = one["value"]
            if one["key"] == "file":
                made[value["path"]] = base64.b64decode(value["content"])
            elif one["key"] == "lfsFile":
                made[value["path"]] = self.hub.objects[value["oid"]]
            elif one["key"] == "deletedFile":
                del made[value["path"]]
        sha = self.hub.commit(name, made)
        url = f"{self.hub.url}/{name}/commit/{sha}"
        self._json({"commitUrl": url, "commitOid": sha, "success": True})

    def _put(self, parts: list[str], query: dict[str, list[str]]) -> None:
        if _sha256(self.content) != parts[1]:
            raise _Refused(400, "", "other content than was announced")
        self.hub.objects[parts[1]] = self.content
        self._send(200, b"", {})


def _listed(name: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": len(data), "oid": _blob(data)}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 134}
    return entry
