"""Finding the program in a rollout: fenced blocks, in one pass over its lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# A fence, what stands before it in its line, and its language. Takes time that is linear in the line.
_FENCE = re.compile(r"(?P<before>.*?)(?P<mark>(?<!`)`{3,}+|(?<!~)~{3,}+)(?P<info>[^`~]*)$", re.DOTALL)
_PYTHON = re.compile(r"\s*\{?\s*\.?py(?:thon)?(?:3(?:\.\d+)?)?(?![\w.+-])", re.IGNORECASE)
# As in Markdown: what is indented further, as in a docstring, is no fence of the block around it.
_INDENT = 3


@dataclass
class _Block:
    mark: str
    column: int
    info: str
    lines: list[str] = field(default_factory=list)
    closed: bool = False

    def has_alone(self, fence: re.Match[str]) -> bool:
        """Whether a line within the block is a fence and nothing else."""
        return not fence["before"].strip() and len(fence["before"]) <= self.column + _INDENT

    def is_ended_by(self, fence: re.Match[str]) -> bool:
        """Whether a line ends the block: a fence of the same mark, at least as long, without a language."""
        return fence["mark"].startswith(self.mark) and not fence["info"].strip() and self.has_alone(fence)

    def source(self) -> str:
        """Of a fence that does not begin its line: the lines without the blanks that the first one begins with."""
        first = next((line for line in self.lines if line.strip()), "")
        width = min(self.column, _blanks(first))
        return "\n".join(line[min(width, _blanks(line)) :] for line in self.lines)


def last_code(text: str) -> list[str]:
    """Where the program may be, the likeliest first: the first one that is Python is the program.

    It is in the last closed block of Python, else in the last ones without a language; behind ``</think>`` if one is
    there. Fences are Markdown's, backticks or tildes; the one that opens may have a text before it in its line.
    """
    visible = text.rpartition("</think>")[2]
    return _last_code(visible) or (_last_code(text) if visible != text else [])


def _last_code(text: str) -> list[str]:
    closed = [block for block in _blocks(text) if block.closed]
    python = [block.source() for block in closed if _PYTHON.match(block.info)]
    return python[-1:] or [block.source() for block in reversed(closed) if not block.info]


def _blocks(text: str) -> list[_Block]:
    """All fenced blocks; one that another one begins in, or that the text ends in, is not closed."""
    blocks: list[_Block] = []
    block: _Block | None = None
    for line in text.split("\n"):
        fence = _FENCE.match(line)
        if fence is not None and block is not None and block.is_ended_by(fence):
            block.closed = True
            block = None
        elif fence is not None and _opens(block, fence):
            block = _Block(fence["mark"], len(fence["before"]), fence["info"].strip())
            blocks.append(block)
        elif block is not None:
            block.lines.append(line)
    return blocks


def _opens(block: _Block | None, fence: re.Match[str]) -> bool:
    """Whether a fence opens a block; within a `block` only one with a language does."""
    if block is None:
        return "```" not in fence["before"]
    return bool(fence["info"].strip()) and block.has_alone(fence)


def _blanks(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))
