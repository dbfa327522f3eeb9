"""Python values as text and back: plain data only, so that reading them runs nothing. Imports nothing of basis_rl.

Both sides of a test need it, each in a process of its own.
"""

from __future__ import annotations

import json
from typing import Any

_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any) -> Any:
    """JSON for None, bool, int, float, complex, str, bytes and list, tuple, set, dict of these; subclasses lose theirs.

    Raises:
        TypeError: anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (float, str)):
        return float(value) if isinstance(value, float) else str(value)
    if isinstance(value, int):
        return {"int": hex(value)}  # of any length; decimal ones of more than 4300 digits are refused by Python
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    raise TypeError(f"a {type(value).__name__} is not plain data")


def decode(data: Any) -> Any:
    """What `encode` was given, of exactly the built-in types.

    Raises:
        ValueError: it is nothing that `encode` writes (KeyError and TypeError too: what comes in is not trusted).
    """
    if data is None or type(data) in (bool, float, str):
        return data
    if type(data) is not dict or len(data) != 1:
        raise ValueError("no encoded value")
    ((name, content),) = data.items()
    if name == "int":
        return int(content, 16)
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item) for item in content)
    if name == "dict":
        return {decode(key): decode(item) for key, item in content}
    if name == "complex":
        return complex(float(content[0]), float(content[1]))
    if name == "bytes":
        return bytes.fromhex(content)
    raise ValueError(f"no encoded value: {str(name)[:20]}")


def dump(message: dict[str, Any]) -> str:
    """One line."""
    return json.dumps(message) + "\n"
