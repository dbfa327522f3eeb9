"""A Hub of one's own on 127.0.0.1: enough of its HTTP API for the real `huggingface_hub` client, which it distrusts.

It checks who asks, the hash and size of what is uploaded, that a commit names only what is there, and the card's
metadata; it can be told to fail. `HF_ENDPOINT` is read when huggingface_hub is imported: use it from subprocesses.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

_LFS = (".safetensors", ".bin", ".pt", ".pth", ".png", ".parquet")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]*")


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "", **body: Any) -> None:
        self.status, self.code, self.body = status, code, {"error": message, **body}


@dataclass
class Blob:
    data: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        return hashlib.sha1(f"blob {len(self.data)}\0".encode() + self.data).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass
class Commit:
    message: str
    files: dict[str, Blob]
    sha: str


@dataclass
class Repo:
    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=dict)

    def add(self, branch: str, message: str, files: dict[str, Blob]) -> Commit:
        sha = hashlib.sha1(f"{message}{time.monotonic_ns()}".encode()).hexdigest()
        self.branches.setdefault(branch, []).append(Commit(message, files, sha))
        return self.branches[branch][-1]

    def at(self, revision: str) -> Commit:
        if revision in self.branches:
            return self.branches[revision][-1]
        for commit in (c for commits in self.branches.values() for c in commits):
            if commit.sha == revision:
                return commit
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")


@dataclass
class Fault:
    """Requests whose method, path and first 300 bytes match `pattern` fail, `times` times (None: for ever).

    `how` is a status code, ``"drop"`` (the connection is closed without an answer), or a function that is called before
    the request is answered as it should be, and may return one of the former in its place.
    """

    pattern: str
    how: int | str | Callable[[], int | str | None]
    times: int | None = None
    hit: int = 0


class HubEndpoint:
    """``with HubEndpoint({"hf_secret": ("alice", "write")}) as hub: ... hub.environment("hf_secret")``."""

    def __init__(self, tokens: dict[str, tuple[str, str]]) -> None:
        self.tokens = tokens
        self.repos: dict[str, Repo] = {}  # "models/alice/x"
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, bytes]] = []
        self.complaints: list[str] = []
        self.lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> HubEndpoint:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """What a subprocess needs to talk to it, with a cache and a login of its own."""
        settings = {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HOME": str(home)}
        return {**settings, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **({"HF_TOKEN": token} if token else {})}

    def fail(self, pattern: str, how: int | str | Callable[[], int | str | None], times: int | None = None) -> Fault:
        self.faults.append(Fault(pattern, how, times))
        return self.faults[-1]

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        return {path: blob.data for path, blob in self.repos[repo].at(revision).files.items()}

    def everything(self) -> bytes:
        """All that was ever sent to it, but for the header that carries the token."""
        return b"\n".join([f"{m} {p}".encode() + b" " + body for m, p, body in self.requests])


class _Handler(BaseHTTPRequestHandler):
    hub: HubEndpoint
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def answer(self) -> None:
        method, parts = self.command, urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            self.hub.requests.append((method, self.path, body))
            asked = f"{method} {self.path} {body[:300]!r}"
            fault = next((f for f in self.hub.faults if re.search(f.pattern, asked)), None)
            if fault is not None and (fault.times is None or fault.hit < fault.times):
                fault.hit += 1
            else:
                fault = None
        how = fault.how if fault is not None else None
        how = how() if callable(how) else how
        if how is not None:
            self.close_connection = True
            if how != "drop":
                self.reply(int(how), json.dumps({"error": "told to fail"}).encode())
            return
        try:
            with self.hub.lock:
                for pattern, name in ROUTES:
                    match = re.fullmatch(pattern, f"{method} {parts.path}")
                    if match:
                        groups = {key: unquote(value) for key, value in match.groupdict().items() if value}
                        status, content, headers = getattr(self, name)(body=body, **groups)
                        break
                else:
                    if method != "GET":  # the client asks for some things of its own that it can do without
                        self.hub.complaints.append(f"not implemented: {method} {self.path}")
                    raise Refused(404, "not implemented")
        except Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.body["error"]}
            status, content = refused.status, refused.body
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.reply(status, data, headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def reply(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        given = {"Content-Length": str(len(data)), "Content-Type": "application/json", **(headers or {})}
        for key, value in given.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def user(self, *, write: bool = False) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise Refused(401, "Invalid credentials in Authorization header")
        name, role = self.hub.tokens.get(token, (None, "none"))
        if write and name is None:
            raise Refused(401, "Invalid username or password.")
        if write and role != "write":
            raise Refused(403, f"You don't have write access as {name}.")
        return name

    def repo(self, kind: str, id: str, *, write: bool = False) -> Repo:
        name = self.user(write=write)
        repo = self.hub.repos.get(f"{kind}/{id}")
        if repo is None or (repo.private and name != id.split("/")[0]):
            raise Refused(401 if name is None else 404, "Repository Not Found", "RepoNotFound")
        if write and name != id.split("/")[0]:
            raise Refused(403, f"{name} may not write to {id}.")
        return repo

    def whoami(self, body: bytes) -> Any:
        name = self.user()
        if name is None:
            raise Refused(401, "Invalid username or password.")
        return 200, {"type": "user", "name": name, "orgs": []}, {}

    def create(self, body: bytes) -> Any:
        name = self.user(write=True)
        asked = json.loads(body)
        owner = asked.get("organization") or name
        kind = f"{asked.get('type') or 'model'}s"
        if not _NAME.fullmatch(asked["name"]):
            raise Refused(400, f"Invalid repo name: {asked['name']}")
        if owner != name:
            raise Refused(403, f"You don't have the rights to create a model under the namespace '{owner}'.")
        id = f"{owner}/{asked['name']}"
        url = f"{self.hub.url}/{'' if kind == 'models' else kind + '/'}{id}"
        if f"{kind}/{id}" in self.hub.repos:
            raise Refused(409, "You already created this model repo", url=url)
        repo = self.hub.repos[f"{kind}/{id}"] = Repo(asked.get("visibility") == "private")
        repo.add("main", "initial commit", {".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)})
        return 200, {"url": url, "name": id, "id": "0" * 24}, {}

    def validate(self, body: bytes) -> Any:
        check_card(json.loads(body)["content"])
        return 200, {"warnings": [], "errors": []}, {}

    def branch(self, body: bytes, kind: str, id: str, revision: str) -> Any:
        repo = self.repo(kind, id, write=True)
        if revision in repo.branches:
            raise Refused(409, "Reference already exists")
        repo.branches[revision] = list(repo.branches["main"])
        return 200, {}, {}

    def preupload(self, body: bytes, kind: str, id: str, revision: str) -> Any:
        files = self.repo(kind, id, write=True).at(revision).files
        answers = []
        for asked in json.loads(body)["files"]:
            path, there = asked["path"], files.get(asked["path"])
            lfs = path.endswith(_LFS) or "tfevents" in path
            known = {} if there is None else {"oid": there.sha256 if there.lfs else there.oid}
            answers.append({"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, **known})
        return 200, {"files": answers}, {}

    def batch(self, body: bytes, id: str, kind: str = "models") -> Any:
        self.repo(kind, id, write=True)
        answers = []
        for asked in json.loads(body)["objects"]:
            action: dict[str, Any] = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.objects:
                action["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}/{asked['size']}"}}
            answers.append(action)
        return 200, {"transfer": "basic", "objects": answers}, {"Content-Type": "application/vnd.git-lfs+json"}

    def upload(self, body: bytes, oid: str, size: str) -> Any:
        if hashlib.sha256(body).hexdigest() != oid or len(body) != int(size):
            self.hub.complaints.append(f"uploaded as {oid} with {size} bytes, but is not that")
            raise Refused(400, "content does not match its hash")
        self.hub.objects[oid] = body
        return 200, b"", {}

    def commit(self, body: bytes, kind: str, id: str, revision: str) -> Any:
        repo = self.repo(kind, id, write=True)
        files = dict(repo.at(revision).files)
        header, *operations = [json.loads(line) for line in body.splitlines()]
        assert header["key"] == "header", header
        for operation in operations:
            key, value = operation["key"], operation["value"]
            path = value["path"]
            if path.startswith(("/", ".git/")) or ".." in path.split("/"):
                raise Refused(400, f"bad path {path}")
            if key == "deletedFile":
                if files.pop(path, None) is None:
                    raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
            elif key == "file":
                files[path] = Blob(base64.b64decode(value["content"]), False)
            elif key == "lfsFile":
                data = self.hub.objects.get(value["oid"])
                if data is None or len(data) != value["size"]:
                    self.hub.complaints.append(f"{path} was never uploaded")
                    raise Refused(400, f"LFS pointer of {path} points to nothing")
                files[path] = Blob(data, True)
            else:
                raise Refused(400, f"unknown operation {key}")
        if "README.md" in files and kind == "models":
            check_card(files["README.md"].data.decode())
        commit = repo.add(revision, header["value"]["summary"], files)
        url = f"{self.hub.url}/{id}/commit/{commit.sha}"
        return 200, {"commitUrl": url, "commitOid": commit.sha, "success": True}, {}

    def info(self, body: bytes, kind: str, id: str, revision: str = "main") -> Any:
        repo = self.repo(kind, id)
        commit = repo.at(revision)
        siblings = [{"rfilename": path} for path in commit.files]
        return 200, {"id": id, "sha": commit.sha, "private": repo.private, "siblings": siblings, "tags": []}, {}

    def tree(self, body: bytes, kind: str, id: str, revision: str, path: str = "") -> Any:
        files = self.repo(kind, id).at(revision).files
        found = {name: blob for name, blob in files.items() if not path or name.startswith(f"{path}/")}
        if path and not found:
            raise Refused(404, f"{path} does not exist", "EntryNotFound")
        return 200, [_entry(name, blob) for name, blob in found.items()], {}

    def paths(self, body: bytes, kind: str, id: str, revision: str) -> Any:
        files = self.repo(kind, id).at(revision).files
        asked = parse_qs(body.decode()).get("paths", []) if body[:1] != b"{" else json.loads(body)["paths"]
        return 200, [_entry(name, files[name]) for name in asked if name in files], {}

    def resolve(self, body: bytes, id: str, revision: str, path: str, kind: str = "models") -> Any:
        commit = self.repo(kind, id).at(revision)
        blob = commit.files.get(path)
        if blob is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{blob.oid}"', "Content-Type": "application/octet-stream"}
        if blob.lfs:
            headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data))}
        return 200, blob.data, headers


def _entry(name: str, blob: Blob) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": len(blob.data), "oid": blob.oid}
    if blob.lfs:
        entry["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 130}
    return entry


def check_card(content: str) -> None:
    """The Hub's rules for a card's metadata, as far as ours could break them."""
    match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    data = yaml.safe_load(match.group(1)) if match else {}
    errors = []
    for key, kind in (
        ("license", str),
        ("library_name", str),
        ("pipeline_tag", str),
        ("tags", list),
        ("datasets", list),
    ):
        if key in data and not isinstance(data[key], kind):
            errors.append(f'"{key}" must be a {kind.__name__}')
    if "licence" in data:
        errors.append('"licence" is no key')
    for model in data.get("model-index") or []:
        for result in model["results"]:
            if not {"task", "dataset", "metrics"} <= set(result) or not result["dataset"].get("type"):
                errors.append('"model-index" is incomplete')
    if errors:
        raise Refused(400, "invalid metadata", errors=[{"message": error} for error in errors])


_REPO = r"(?P<kind>models|datasets)/(?P<id>[^/]+/[^/]+)"
_PAGE = r"/(?:(?P<kind>datasets)/)?(?P<id>[^/]+/[^/]+?)"
ROUTES = [
    (r"GET /api/whoami-v2", "whoami"),
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate"),
    (rf"POST /api/{_REPO}/branch/(?P<revision>[^/]+)", "branch"),
    (rf"POST /api/{_REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    (rf"POST /api/{_REPO}/commit/(?P<revision>[^/]+)", "commit"),
    (rf"POST /api/{_REPO}/paths-info/(?P<revision>[^/]+)", "paths"),
    (rf"GET /api/{_REPO}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree"),
    (rf"GET /api/{_REPO}(?:/revision/(?P<revision>[^/]+))?", "info"),
    (rf"POST {_PAGE}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /lfs/(?P<oid>[0-9a-f]{64})/(?P<size>\d+)", "upload"),
    (rf"(?:GET|HEAD) {_PAGE}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]
