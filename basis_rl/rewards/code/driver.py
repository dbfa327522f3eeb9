"""The process that the model's code runs in, when tests call its functions. A script; imports nothing of basis_rl.

``{"name": ..., "args": [...], "kwargs": {...}}`` a line in, ``{"value": ...}`` or ``{"error": name of an exception}`` a
line out. Nothing here is trusted: the code may write whatever it likes to where the answers go. What it cannot know is
what is expected, which is in another process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from values import decode, dump, encode  # type: ignore[import-not-found]

del sys.path[0]

# What the usual sites import for everybody: starter code names `List` without an import.
_PRELUDE = """
from typing import *
from collections import *
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush
from bisect import bisect_left, bisect_right
from math import ceil, comb, floor, gcd, inf, sqrt
"""


def find(namespace: dict[str, Any], name: str) -> Any:
    """The function: a global one, or a method of ``Solution``."""
    if name not in namespace and "Solution" in namespace:
        return getattr(namespace["Solution"](), name)
    return namespace[name]


def main(path: str) -> None:
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    namespace: dict[str, Any] = {"__name__": "candidate"}
    broken = None
    try:
        exec(_PRELUDE, namespace)
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), "candidate.py", "exec"), namespace)
    except BaseException as error:  # the candidate may raise anything, SystemExit too; asked again, it says so
        broken = type(error).__name__
    for line in asked:
        request = json.loads(line)
        try:
            if broken is not None:
                raise ImportError(broken)
            args = [decode(value) for value in request["args"]]
            kwargs = {key: decode(value) for key, value in request["kwargs"].items()}
            answer = {"value": encode(find(namespace, request["name"])(*args, **kwargs))}
        except BaseException as error:  # of the candidate, and told to the tests
            answer = {"error": type(error).__name__}
        answers.write(dump(answer))


if __name__ == "__main__":
    main(sys.argv[1])
