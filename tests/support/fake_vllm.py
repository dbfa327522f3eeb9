"""An HTTP server that answers as vLLM does, without a model: what it samples is a hash of prompt and seed."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from basis_rl.rollout.server import free_port


def completion(prompt: list[int], seed: int, length: int) -> dict[str, Any]:
    """What a model of some sort says to `prompt` with this seed: 1 to `length` tokens; the last is 1, or it is cut."""
    digest = hashlib.sha256(f"{prompt}:{seed}".encode()).digest()
    size = 1 + digest[0] % length
    ids = [2 + byte for byte in digest[1 : 1 + size]]
    ended = digest[0] % 2 == 0
    ids = [*ids[:-1], 1] if ended else ids
    return {"text": "", "token_ids": ids, "finish_reason": "stop" if ended else "length"}


class FakeServer:
    """Use as a context manager. `requests` holds every body; `before(number, body)` may sleep, or return a status."""

    def __init__(self, seconds: float = 0.0, max_model_len: int = 64, root: str = "model") -> None:
        self.seconds, self.max_model_len, self.root = seconds, max_model_len, root
        self.requests: list[dict[str, Any]] = []
        self.in_flight = self.most = 0
        self.before: Callable[[int, dict[str, Any]], int | None] = lambda number, body: None
        self.healthy = True
        self.lock = threading.Lock()
        self.http: ThreadingHTTPServer | None = None
        self.port = free_port()  # its own also while it is stopped

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> FakeServer:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                model = {"id": "fake", "root": owner.root, "max_model_len": owner.max_model_len}
                self.answer(200 if owner.healthy else 503, {"data": [model]} if self.path == "/v1/models" else None)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(*owner.complete(body))

            def answer(self, status: int, content: Any) -> None:
                data = b"" if content is None else json.dumps(content).encode()
                with suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

        ThreadingHTTPServer.request_queue_size = 256
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.requests.append(body)
            number = len(self.requests)
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
        try:
            status = self.before(number, body)
            time.sleep(self.seconds)
        finally:
            with self.lock:
                self.in_flight -= 1
        if status is not None:
            return status, {"error": {"message": "so it was asked for"}}
        if body["temperature"] == 0 and body["n"] > 1:
            return 400, {"error": {"message": "n must be 1 when using greedy sampling"}}
        choices = [completion(body["prompt"], body["seed"] + k, body["max_tokens"]) for k in range(body["n"])]
        rows = [{"index": k, **choice} for k, choice in enumerate(choices)]
        return 200, {"choices": rows[::-1]}

    def stop(self) -> None:
        if self.http is not None:
            self.http.shutdown()
            self.http.server_close()
            self.http = None

    def __enter__(self) -> FakeServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
