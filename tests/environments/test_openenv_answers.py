"""What a server that should list its tasks may answer instead; OpenEnv itself is not needed for that."""

import pytest

from basis_rl.environments import openenv
from tests.support.dripping import dripping


def answer(body, status="200 OK", extra=""):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra}\r\n{body}".encode()


ANSWERS = {
    "byte by byte": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", 0.3, "no whole answer within 0.3 s"),
    "a redirect": (answer("", "307 Go", "Location: http://127.0.0.1:9/\r\n"), 30.0, "redirect to http://127.0.0.1:9/"),
    "too deep": (answer("[" * 100_000), 30.0, "recursion"),
    "no list": (answer("3"), 30.0, "int"),
    "two": (answer('["a", "b"]'), 30.0, "too many values"),
    "an error": (answer("", "500 \x1b[31m"), 30.0, r"500 Server Error: \\x1b\[31m"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_what_lists_no_tasks_is_one_message(case, monkeypatch):
    said, patience, why = ANSWERS[case]
    monkeypatch.setattr(openenv, "_PATIENCE", patience)
    with dripping(said) as url, pytest.raises(ValueError, match=f"lists no tasks of the split 'train': .*{why}"):
        openenv.tasks(url)
