"""HTTP servers that answer as vLLM does: one samples a hash of prompt and seed, the other has a model to train."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from basis_rl.engine.server import free_port
from basis_rl.engine.worker import WeightSync


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
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.most = 0
        self.before: Callable[[int, dict[str, Any]], int | None] = lambda number, body: None
        self.healthy = True
        self.more_headers: dict[str, str] = {}
        self.lock = threading.Lock()
        self.http: ThreadingHTTPServer | None = None
        self.connections: set[socket.socket] = set()
        self.port = free_port()  # its own also while it is stopped

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> FakeServer:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def setup(self) -> None:
                super().setup()
                owner.connections.add(self.connection)

            def finish(self) -> None:
                owner.connections.discard(self.connection)
                super().finish()

            def do_GET(self) -> None:
                self.answer(200 if owner.healthy else 503, owner.get(self.path.split("?")[0]))

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                owner.headers.append(dict(self.headers))
                self.answer(*owner.post(self.path, json.loads(data or b"{}")))

            def answer(self, status: int, content: Any) -> None:
                data = b"" if content is None else json.dumps(content).encode()
                with suppress(OSError):
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(data)), **owner.more_headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)

        ThreadingHTTPServer.request_queue_size = 256
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def get(self, path: str) -> Any:
        model = {"id": "fake", "root": self.root, "max_model_len": self.max_model_len}
        return {"data": [model]} if path == "/v1/models" else None

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
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
        return self.answered(path, body)

    def answered(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if body["temperature"] == 0 and body["n"] > 1:
            return 400, {"error": {"message": "n must be 1 when using greedy sampling"}}
        choices = [completion(body["prompt"], body["seed"] + k, body["max_tokens"]) for k in range(body["n"])]
        rows = [{"index": k, "prompt_token_ids": body["prompt"], **choice} for k, choice in enumerate(choices)]
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
        for connection in list(self.connections):  # a client that keeps one open would keep its thread here
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class ModelServer(FakeServer):
    """As `basis-rl serve` in what training asks of it, with transformers' model in this process in vLLM's place.

    `before` and `requests` see every POST in order; `loads` counts the weights that came. `seconds` is the time between
    the arrival of a request and the first use of the weights; `spoil` may change an answer with completions.
    """

    def __init__(self, model: Path, max_model_len: int = 128) -> None:
        super().__init__(max_model_len=max_model_len, root=str(model))
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
        self.loads = 0
        self.new_worker()
        self.ignored: tuple[str, ...] = ()  # parameters that stay what they were
        self.max_lora_rank: int | None = None  # None: it cannot load adapters
        self.serves: Callable[[str], str | None] = lambda name: name  # which adapter answers to a name
        self.drawn = torch.Generator().manual_seed(0)
        self.engine = threading.RLock()
        # While it is not set, requests stand still; from the first pause on, they are answered token by token.
        self.going = threading.Event()
        self.going.set()
        self.in_steps = False
        self.token_seconds = 0.0
        self.progress: dict[str, int] = {}

    def restart(self) -> None:
        """As a new process: other workers, and the weights of the checkpoint."""
        self.stop()
        self.model.load_state_dict(AutoModelForCausalLM.from_pretrained(self.root, dtype="float32").state_dict())
        self.new_worker()
        self.start()

    def new_worker(self) -> None:
        """What a new process has of ours, which is the real thing."""
        self.worker = WeightSync()
        self.worker.model_config = SimpleNamespace(hf_text_config=self.model.config)
        self.spoil: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}  # by name: changes of weights

    def asked(self, kind: str) -> list[dict[str, Any]]:
        """Bodies of the requests so far: ``sampling``, ``probe`` or the name of a method of the workers."""
        return [body for body in self.requests if self.kind(body) == kind]

    @staticmethod
    def kind(body: dict[str, Any]) -> str:
        if "lora_name" in body:
            return "load" if "lora_path" in body else "unload"
        return str(body.get("method") or ("probe" if "prompt_logprobs" in body else "sampling" if body else "reset"))

    def turned(self, path: str) -> tuple[int, Any]:
        """Paused, once no request is within a token, or resumed."""
        self.in_steps = True
        with self.engine:
            (self.going.set if path == "/resume" else self.going.clear)()
        return 200, {"status": "done"}

    def get(self, path: str) -> Any:
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/server_info":
            lora = None if self.max_lora_rank is None else {"max_lora_rank": self.max_lora_rank}
            return {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}, "lora_config": lora}}
        found = super().get(path)
        if path == "/v1/models":
            found["data"] += [{"id": name, "root": f"/somewhere/{name}"} for name in self.adapters]
        return found

    def answered(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in ("/pause?mode=keep", "/resume"):
            return self.turned(path)
        with nullcontext() if self.in_steps and self.kind(body) == "sampling" else self.engine, torch.no_grad():
            if path == "/collective_rpc":
                return 200, {"results": [getattr(self, body["method"])(*body["args"])]}
            if path == "/reset_prefix_cache":
                return 200, {"success": True}
            if path.endswith("_lora_adapter"):
                return self.change_adapters(body)
            assert path == "/v1/completions"
            if body["model"] not in ("fake", *self.adapters):
                return 404, {"error": {"message": f"The model {body['model']} does not exist."}}
            return self.completed(body)

    def completed(self, body: dict[str, Any]) -> tuple[int, Any]:
        if any(len(prompt) + body["max_tokens"] > self.max_model_len for prompt in body["prompt"]):
            return 400, {"error": {"message": "longer than the model's context"}}
        if body.get("prompt_logprobs") is not None:
            with self.adapted(self.serves(body["model"])):
                return 200, {"choices": [{"prompt_logprobs": self.prompt_logprobs(*body["prompt"])}]}
        choices = [self.choice(prompt, body) for prompt in body["prompt"] for _ in range(body["n"])]
        return 200, self.spoil({"choices": [{"index": i, **choice} for i, choice in enumerate(choices)]})

    def change_adapters(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["lora_name"]
        if self.max_lora_rank is None:
            return 404, {"detail": "Not Found"}
        if "lora_path" not in body:
            status = 400 if not name else 200 if self.adapters.pop(name, None) else 404
            return status, {"error": {"message": "The name is missing or unknown."}}
        config = json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())
        if config["use_dora"] or config["modules_to_save"] or config["r"] > self.max_lora_rank:
            return 500, {"error": {"message": "vLLM does not support this adapter."}}
        found = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
        scaling = config["lora_alpha"] / config["r"]
        self.adapters[name] = {
            name.removeprefix("base_model.model.").replace(".lora_A.", "."): scaling
            * (found[name.replace(".lora_A.", ".lora_B.")] @ down)
            for name, down in found.items()
            if ".lora_A." in name and not name.endswith(tuple(f"{each}.lora_A.weight" for each in self.ignored))
        }
        return 200, "Success"

    @contextmanager
    def adapted(self, name: str | None) -> Iterator[None]:
        """The model with an adapter."""
        weights = dict(self.model.named_parameters())
        changed = {key: weights[key].clone() for key in self.adapters.get(str(name), {})}
        for key, delta in self.adapters.get(str(name), {}).items():
            weights[key] += delta
        try:
            yield
        finally:
            for key, before in changed.items():
                weights[key].copy_(before)

    def basis_progress(self) -> dict[str, int]:
        return {f"cmpl-{name}-0-beef": count for name, count in self.progress.items()}

    def basis_state(self, *given: Any) -> dict[str, Any]:
        return self.worker.basis_state(*given)

    def basis_hold(self, *given: Any) -> dict[str, Any]:
        return dict(self.worker.basis_hold(*given))

    def basis_reload(self, folder: str) -> dict[str, Any]:
        self.loads += 1
        for path in Path(folder).glob("*.safetensors"):
            found = {name: value for name, value in load_file(path).items() if name not in self.ignored}
            assert not self.model.load_state_dict(found, strict=False).unexpected_keys
        return {"tied": []}

    def prompt_logprobs(self, ids: list[int]) -> list[Any]:
        log_probs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return [None, *({str(token): {"logprob": float(log_probs[i, token])}} for i, token in enumerate(ids[1:]))]

    def step(self, ids: list[int], body: dict[str, Any]) -> tuple[int, float]:
        """The next token and its log-probability."""
        while True:
            self.going.wait()
            with self.engine:
                # It may have been paused in between.
                if not self.going.is_set():
                    continue
                with self.adapted(self.serves(body["model"])):
                    logits = self.model(torch.tensor([ids])).logits[0, -1] / (body["temperature"] or 1.0)
                allowed = body.get("allowed_token_ids") or slice(None)
                kept = torch.full_like(logits, -torch.inf)
                kept[allowed] = logits[allowed]
                found = kept.log_softmax(-1)
                token = int(found.exp().multinomial(1, generator=self.drawn) if body["temperature"] else found.argmax())
                if "request_id" in body:
                    self.progress[body["request_id"]] = self.progress.get(body["request_id"], 0) + 1
            time.sleep(self.token_seconds)
            return token, float(found[token])

    def choice(self, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        ids, log_probs = list(prompt), []
        while len(log_probs) < body["max_tokens"] and not (log_probs and ids[-1] == self.model.config.eos_token_id):
            token, log_prob = self.step(ids, body)
            ids.append(token)
            log_probs.append(log_prob)
        tokens = [f"token_id:{token}" for token in ids[len(prompt) :]]
        rows = {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": [None] * len(tokens)}
        reason = "stop" if ids[-1] == self.model.config.eos_token_id else "length"
        found = {"prompt_token_ids": prompt, "token_ids": ids[len(prompt) :], "logprobs": rows}
        return {**found, "finish_reason": reason}
