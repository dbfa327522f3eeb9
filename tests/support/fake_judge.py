"""An HTTP server that answers chat completions as a judge does, and may fail, stall and lie."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.support.fake_vllm import FakeServer

_MATERIAL = re.compile(r"<(\w+-[0-9a-f]{12})>\n(.*?)\n</\1>", re.DOTALL)


def material(question: str) -> dict[str, str]:
    """The texts between the tags of a question, by their names."""
    return {tag.partition("-")[0]: text for tag, text in _MATERIAL.findall(question)}


def instructions(question: str) -> str:
    """What stands outside of the tags, where a judge takes its orders from; without the mark of the tags."""
    mark = _MATERIAL.search(question)[1].partition("-")[2]
    return _MATERIAL.sub("", question).replace(mark, "MARK")


class JudgeServer(FakeServer):
    """`says` makes the judge's answer of a question; `content` may spoil what is sent. `before` as in `FakeServer`."""

    def __init__(self, says: Callable[[str], str] = lambda question: "Score: 1", **given: Any) -> None:
        super().__init__(**given)
        self.says = says
        self.content: Callable[[dict[str, Any]], Any] = lambda content: content

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    @property
    def questions(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.requests]

    def answered(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/v1/chat/completions" or len(body["messages"]) != 1:
            return 404, {"error": {"message": f"no such path as {path}"}}
        message = {"role": "assistant", "content": self.says(body["messages"][0]["content"])}
        return 200, self.content({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


def equal(question: str) -> str:
    """A judge that takes an answer for right if its letters and digits are those of the reference."""
    shown = material(question)
    plain = [re.sub(r"\W", "", shown.get(name, "")).lower() for name in ("answer", "solution")]
    return f"The answers were compared.\nScore: {int(plain[0] == plain[1])}"
