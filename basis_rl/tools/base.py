"""What a tool is: something with a name, a typed signature and a docstring, from which the model learns to call it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolResult:
    """What the model is shown, and whether the call failed (for the metrics; the model reads the text)."""

    text: str
    failed: bool = False


class ToolBroken(RuntimeError):
    """The tool itself does not work, whatever it is asked: training on its errors would teach nothing."""


class ConcurrentTool(Protocol):
    """A tool whose calls may run at the same time: all calls of a turn are started before the first is waited for.

    ``__call__`` has the signature and the docstring that the model is shown. A plain function is a tool as well; its
    calls run one after the other.
    """

    __name__: str

    def start(self, **arguments: Any) -> Future[ToolResult]:
        """Begin a call.

        Raises:
            TypeError: the arguments do not fit the signature; the model sees the message.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> str: ...
