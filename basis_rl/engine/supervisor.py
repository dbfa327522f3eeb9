"""A vLLM server that is started again when it dies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from basis_rl.engine.server import Server, ServerError, ServerOptions, can_change, failure_reason, has_answered


@contextmanager
def kept_alive(options: ServerOptions, restarts: int = 3, poll: float = 1.0) -> Iterator[Server]:
    """A server for the time of the context; if it ends by itself, it is restarted at the same address.

    A restarted server has the model that it was first started with: the trainer has to push the weights again, as
    `BasisTrainer` does. Each restart has its own log, next to the first. A server that hangs is not detected here. One
    that ended before it answered, for a reason that cannot change (`can_change`), is not restarted. `Server.given_up`
    is true once the supervisor stops restarting it.

    Args:
        options: port and all; the port must not be 0.
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

    # All in one thread: a server ends with the thread that launched it.
    def supervise() -> None:
        current = server
        try:
            current.start()
        except ServerError as error:
            failure.append(error)
        except OSError as error:
            # There is no room for the log, or no memory for a process.
            failure.append(ServerError(f"The vLLM server could not be started: {error}"))
        finally:
            started.set()
        left = restarts if not failure else 0
        while not ending.wait(poll):
            current.note_segments()
            if current.process is None or current.process.poll() is None:
                continue
            again = _started_again(current, options, restarts - left + 1) if left else None
            server.given_up = server.given_up or again is None
            current, left = (current, 0) if again is None else (again, left - 1)
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
