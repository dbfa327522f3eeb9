"""A server that says something byte by byte, and then nothing more, for as long as somebody listens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Between two bytes: far less than any time limit.
_PAUSE = 0.02


@contextmanager
def dripping(begins: bytes) -> Iterator[str]:
    """Its URL. It answers every request with `begins` at once, and then blanks, or letters of a header's value."""
    listening = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(begins)
            while not ended.wait(_PAUSE):
                connection.sendall(b" ")

    def serve() -> None:
        with suppress(OSError):
            while not ended.is_set():
                threading.Thread(target=answer, args=listening.accept()[:1], daemon=True).start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        ended.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
