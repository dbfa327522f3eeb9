"""Secrets out of what is saved and shown to others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_SECRET_KEYS = re.compile(r"(^|[_\-.])(token|api[_-]?key|secret|password|passwd|credentials?)$", re.IGNORECASE)
_HUB_TOKEN = re.compile(r"\b(hf|api_org)_[A-Za-z0-9]{16,}")
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SPECIAL_TOKENS = {"pad_token", "eos_token", "bos_token", "unk_token"}  # of a tokenizer: no secrets
HIDDEN = "<hidden>"


def is_secret(key: object) -> bool:
    """Whether a setting of this name holds a secret: ``hub_token``, ``api_key``, ``password`` and the like."""
    return str(key) not in _SPECIAL_TOKENS and bool(_SECRET_KEYS.search(str(key)))


def redact(value: Any) -> Any:
    """`value` without secrets: entries of mappings whose name says so are left out, tokens within texts are hidden."""
    if isinstance(value, Mapping):
        return {key: redact(entry) for key, entry in value.items() if not is_secret(key)}
    if type(value) in (list, tuple):
        return type(value)(redact(entry) for entry in value)
    if type(value) is str:
        if value.lstrip().startswith("{"):  # settings that are given as JSON
            with suppress(json.JSONDecodeError):
                parsed = json.loads(value)
                return value if redact(parsed) == parsed else json.dumps(redact(parsed))
        return _USER_IN_URL.sub(HIDDEN, _HUB_TOKEN.sub(HIDDEN, value))
    return value


def redact_command(argv: list[str]) -> list[str]:
    """A command line without secrets: ``--hub_token x`` and ``--hub_token=x`` lose their value."""
    shown, hide = [], False
    for word in argv:
        flag, equals, value = word.partition("=")
        secret = flag.startswith("-") and is_secret(flag.lstrip("-"))
        plain = f"{flag}={redact(value)}" if flag.startswith("-") and equals else redact(word)
        shown.append(HIDDEN if hide else f"{flag}={HIDDEN}" if secret and equals else plain)
        hide = secret and not equals
    return shown
