"""A request ends by its time limit, whatever the server sends until then, and goes nowhere else."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from basis_rl.run.http import BoundedSession
from tests.support.dripping import dripping
from tests.support.fake_vllm import FakeServer

LONG = b"Content-Length: 100000\r\n"
DRIPS = {
    "the body": b"HTTP/1.1 200 OK\r\n" + LONG + b"\r\n",
    "a body until the end": b"HTTP/1.1 200 OK\r\n\r\n",
    "pieces": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n",
    "a header": b"HTTP/1.1 200 OK\r\nX-Long: ",
    "the first line": b"HTTP/1.1 200",
    "of an error": b"HTTP/1.1 500 No\r\n" + LONG + b"\r\n",
    "of a redirect": b"HTTP/1.1 302 No\r\nLocation: http://127.0.0.1:9\r\n" + LONG + b"\r\n",
}


def late(call, seconds=30.0):
    """What `call` raises within `seconds`, which is far more than its limit; None if it goes on."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


@pytest.mark.parametrize("what", DRIPS)
def test_an_answer_that_drips_is_over_at_the_time_limit(what):
    with dripping(DRIPS[what]) as url:
        session = BoundedSession()
        found = late(lambda: session.post(url, json={}, timeout=0.3))
        assert isinstance(found, requests.Timeout)
        assert str(found) == "no whole answer within 0.3 s"
        assert not session.adapter.sockets


def test_an_answer_in_time_is_whole_and_the_limit_is_of_one_request():
    with FakeServer() as fake:
        session = BoundedSession()
        for _ in range(3):
            assert json.loads(session.get(f"{fake.url}/v1/models", timeout=30.0).content)["data"]
        assert not session.adapter.sockets
        fake.before = lambda number, body: time.sleep(60)
        body = {"prompt": [1], "n": 1, "temperature": 1.0}
        assert isinstance(late(lambda: session.post(fake.url, json=body, timeout=0.3)), requests.Timeout)


def test_a_connection_that_was_kept_open_has_the_limit_too():
    connections = set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_GET(self):
            connections.add(self.client_address)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"o")
            self.wfile.flush()
            if self.path != "/quick":
                ended.wait(60)
            self.wfile.write(b"k")

    ended = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}"
        session = BoundedSession()
        assert session.get(f"{url}/quick", timeout=30.0).content == b"ok"
        found = late(lambda: session.get(f"{url}/slow", timeout=0.3))
        ended.set()
        assert isinstance(found, requests.Timeout)
        assert len(connections) == 1
        http.shutdown()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_that_names_the_other_address(status):
    with FakeServer() as other:
        head = f"HTTP/1.1 {status} Go\r\nLocation: {other.url}/v1\r\nContent-Length: 0\r\n\r\n"
        with dripping(head.encode()) as url, pytest.raises(requests.TooManyRedirects, match=f"{other.url}/v1"):
            BoundedSession().post(url, json={}, timeout=30.0)
        assert not other.requests
        assert not other.headers
