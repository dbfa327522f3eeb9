"""HTTP with a time limit for the whole answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import requests
from requests.adapters import HTTPAdapter

# Seconds to connect, at most.
_CONNECT = 10.0


class BoundedSession(requests.Session):
    """The timeout of a request, in seconds, counts from its beginning to the end of its answer, which is read at once.

    The limit of a socket is one between two pieces, so a server that sends a byte now and then would be waited for
    forever. Nothing is repeated, and a redirect is a failure (`requests.TooManyRedirects`): it would send the request
    elsewhere, without its body.

    Args:
        connections: kept open, at most.
    """

    def __init__(self, connections: int = 1) -> None:
        super().__init__()
        self.adapter = _Adapter(pool_maxsize=connections)
        self.mount("http://", self.adapter)
        self.mount("https://", self.adapter)

    def abort(self) -> None:
        """End all requests in flight, in whatever thread, and refuse later ones."""
        self.adapter.closed = True
        self.cut()

    def cut(self) -> None:
        """End the requests in flight; later ones are sent."""
        _end(list(self.adapter.sockets))


class _Adapter(HTTPAdapter):
    """Knows the sockets that wait for an answer: all `sockets`, and in `own` that of this thread's last request."""

    closed = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sockets: set[socket.socket] = set()
        self.own = threading.local()

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        seconds = kwargs["timeout"]
        # The timer alone ends what comes after the connection, so that a failure has one name.
        kwargs["timeout"] = (min(_CONNECT, seconds), None)
        sockets = self.own.sockets = []
        until = self.own.until = time.monotonic() + seconds
        watch = threading.Timer(seconds, _end, (sockets,))
        watch.daemon = True
        watch.start()
        try:
            response = super().send(request, *args, **kwargs)
            # This reads it; one that was cut off may look whole.
            _ = response.content
            if time.monotonic() >= until:
                raise requests.Timeout
        except requests.RequestException as error:
            if time.monotonic() < until:
                raise
            raise requests.Timeout(f"no whole answer within {seconds:g} s") from error
        finally:
            watch.cancel()
            self.sockets.difference_update(sockets)
        if response.is_redirect:
            raise requests.TooManyRedirects(f"a redirect to {response.headers['Location']}, which is not followed")
        return response

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool = super().get_connection_with_tls_context(*args, **kwargs)
        adapter = self

        class Connection(type(pool).ConnectionCls):  # type: ignore[misc]
            def getresponse(self) -> Any:
                adapter.sockets.add(self.sock)
                adapter.own.sockets.append(self.sock)
                if adapter.closed or time.monotonic() >= adapter.own.until:
                    raise TimeoutError("ended")
                return super().getresponse()

        pool.ConnectionCls = Connection
        return pool


def _end(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
