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
    # Where a line of it ends in a fence: the number of the first one, and what stands before the fence.
    glued: tuple[int, str] | None = None

    def candidates(self, closed: bool) -> list[str]:
        """What it may hold: the lines up to one that is a fence, or else up to one that ends in a fence."""
        found = [self.lines] if closed else []
        if self.glued is not None:
            number, last = self.glued
            found.append([*self.lines[:number], last])
        return ["\n".join(self._unindented(lines)) for lines in found]

    def _unindented(self, lines: list[str]) -> list[str]:
        """Of a fence that does not begin its line: the lines without the blanks that the first one begins with."""
        first = next((line for line in lines if line.strip()), "")
        width = min(self.column, _blanks(first))
        return [line[min(width, _blanks(line)) :] for line in lines] if width else lines


def last_code(text: str) -> list[str]:
    """Where the program may be, the likeliest first: the first one that is Python is the program.

    It is in the last closed block of Python, else in the last ones without a language; behind ``</think>`` if one is
    there. Fences are Markdown's, backticks or tildes, and may have a text before them in their line.
    """
    visible = text.rpartition("</think>")[2]
    return _last_code(visible) or (_last_code(text) if visible != text else [])


def _last_code(text: str) -> list[str]:
    python: list[str] = []
    bare: list[list[str]] = []

    def keep(block: _Block, closed: bool) -> None:
        nonlocal python
        if _PYTHON.match(block.info):
            python = block.candidates(closed) or python
        elif not block.info:
            bare.append(block.candidates(closed))

    block: _Block | None = None
    for line in text.split("\n"):
        fence = _FENCE.match(line)
        if fence is not None and block is not None and _ends(block, fence):
            keep(block, closed=True)
            block = None
            continue
        opened = _opened(block, fence) if fence is not None else None
        if block is not None and opened is None:
            if fence is not None and block.glued is None and _same_kind(block, fence):
                block.glued = (len(block.lines), fence["before"])
            block.lines.append(line)
        elif opened is not None:
            if block is not None:
                keep(block, closed=False)
            block = opened
    if block is not None:
        keep(block, closed=False)
    return python or [candidate for candidates in reversed(bare) for candidate in candidates]


def _same_kind(block: _Block, fence: re.Match[str]) -> bool:
    return fence["mark"].startswith(block.mark) and not fence["info"].strip()


def _ends(block: _Block, fence: re.Match[str]) -> bool:
    """Whether a line is the closing fence, and nothing else."""
    return _same_kind(block, fence) and _alone(fence, block.column + _INDENT)


def _opened(block: _Block | None, fence: re.Match[str]) -> _Block | None:
    """The block that a fence opens, if it does; within a `block` only a fence with a language opens one."""
    info = fence["info"].strip()
    if block is None:
        opens = "```" not in fence["before"]
    elif block.glued is not None and _PYTHON.match(info):
        opens = True
    else:
        opens = bool(info) and _alone(fence, block.column + _INDENT)
    return _Block(fence["mark"], len(fence["before"]), info) if opens else None


def _alone(fence: re.Match[str], indent: int) -> bool:
    return not fence["before"].strip() and len(fence["before"]) <= indent


def _blanks(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))
