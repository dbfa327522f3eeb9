"""Removes secrets from what is saved and shown to others: known by the names of their keys, or by their form."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

HIDDEN = "<hidden>"
# Repetitions have bounds: a model may write a text of any form, and reading it must take time linear in its length.
# Not by detect-secrets: it knows neither `token` nor values without quotes, and its time grows with the square.
_PLAIN_WORDS = (
    "token|secrets?|passwords?|passwd|passphrase|pwd|pw|pat|sig|signature|credentials?|auth|authorization"
    "|(?:access|api|auth|bearer|hf|hub|refresh)[_-]?tokens|(?:access|account|api|private|secret|signing|ssh)[_-]?keys"
    "|webhooks?(?:[_-]?ur[il]s?)?|hook[_-]?ur[il]s?"
)
# Written as one word.
_JOINED = (
    "[a-z0-9]{1,20}passw(?:or)?d|(?:access|api|auth|bearer|refresh|session)token|(?:api|app|client)secret"
    "|(?:access|account|private|secret|signing|ssh)key"
)
_WORDS = rf"(?:api[_-]?key|[a-z0-9]{{1,40}}[_-]key(?:[_-]?id)?|key(?:[_-]?id)?|{_JOINED}|{_PLAIN_WORDS})"
# Where a word begins in `accessToken` and `HFToken`.
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_PREFIX = r"(?:[\w.-]{0,64}[_\-.])?"
_SECRET_KEYS = re.compile(rf"(^|[_\-.]){_WORDS}$", re.IGNORECASE)
# Of a tokenizer or a table: no secrets.
_PUBLIC_KEYS = re.compile(
    r"(^|[_\-.])((pad|eos|bos|unk|sep|cls|mask|image|stop)_token|(sort|primary|label|column)_key)$"
)
# What services' secrets look like, wherever they stand.
_SHAPES = re.compile(
    # Hugging Face.
    r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}"
    # GitHub, GitLab.
    r"|\b(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,})"
    # OpenAI, Anthropic, Stripe.
    r"|\b(?:sk|pk|rk)[-_](?:[A-Za-z0-9]{1,200}[-_]){0,40}[A-Za-z0-9]{16,}"
    # Slack.
    r"|\bxox[abeoprs]-[A-Za-z0-9-]{10,}"
    # AWS, Google.
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}"
    r"|\b(?:npm_[A-Za-z0-9]{30,}|pypi-[\w-]{20,}|dop_v1_[a-f0-9]{32,}|wandb_v1_\w{16,}|nvapi-[\w-]{16,}|r8_\w{20,}|gsk_\w{20,})"
    # JSON web tokens.
    r"|\beyJ[\w-]{8,2000}+\.[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
# A text without any of these matches none of `_SHAPES`. Most rollouts have none, and this is a hundred times faster.
_MARKS = (
    *("hf_", "api_org_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "sk-", "sk_", "pk-", "pk_"),
    *("rk-", "rk_", "xox", "AKIA", "ASIA", "AIza", "ya29.", "npm_", "pypi-", "dop_v1_", "wandb_v1_", "nvapi-", "r8_"),
    *("gsk_", "eyJ", "-----BEGIN "),
)
# Addresses that are secrets themselves.
_HOOK = re.compile(
    r"""\bhooks\.slack\.com/[\w/-]+|(?<=://)(?:[\w-]{1,63}\.){0,5}hooks?\.[^\s"'<>]+"""
    r"""|(?<=/)webhooks?\w{0,3}/[^\s"'<>]+|(?<=/)bot\d{6,12}:[\w-]{20,}"""
)
# Before a colon these may be ordinary English: "token by token: think".
_PROSE = {"key", "token", "secret", "secrets", "auth", "authorization", "pat", "signature"}
# In a program these may be variables: what is a secret is a long word.
_VARIABLES = {"pat", "sig", "signature"}
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_BEARER = re.compile(r"\b((?:Bearer|Basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
# `--key X`, only at the first of several dashes.
_FLAG = re.compile(rf"""(-(?<![\w.-]-)-?{_PREFIX}{_WORDS}\s+)("[^"]*"|'[^']*'|[^\s"'-]\S*)""", re.IGNORECASE)
# `key: X` and `key=X`: the end of a name, in lower case, and the value.
_NAMED = re.compile(rf"""(key(?:[_-]?id)?|{_PLAIN_WORDS})["']?\s*[=:]\s*""")
_VALUE = re.compile(r""""[^"]*"|'[^']*'|\[[^\]\n]{1,4000}+\]|[^\s,;&"'}\]]+""")


def is_secret(key: object) -> bool:
    """Whether a setting of this name holds a secret: ``hub_token``, ``api_key``, ``accessToken`` and the like."""
    name = _HUMP.sub("_", str(key))
    return bool(_SECRET_KEYS.search(name)) and not _PUBLIC_KEYS.search(name.lower())


def redact(value: Any) -> Any:
    """`value` without secrets: entries of mappings whose name says so are left out, those within texts are hidden."""
    if isinstance(value, Mapping):
        return {key: redact(entry) for key, entry in value.items() if not is_secret(key)}
    if type(value) in (list, tuple):
        return type(value)(redact(entry) for entry in value)
    if type(value) is str:
        # Settings that are given as JSON.
        if value.lstrip().startswith(("{", "[")):
            # Also for numbers that are too long, and brackets that are too deep.
            with suppress(ValueError, RecursionError):
                parsed = json.loads(value)
                shown = redact(parsed)
                return value if shown == parsed else json.dumps(shown)
        return _redact_text(value)
    return value


def _redact_text(text: str) -> str:
    if any(mark in text for mark in _MARKS):
        text = _SHAPES.sub(HIDDEN, text)
    if "://" in text:
        text = _USER_IN_URL.sub(HIDDEN, text)
    if "hook" in text or "/bot" in text:
        text = _HOOK.sub(HIDDEN, text)
    lowered = text.lower()
    if "bearer" in lowered or "basic" in lowered:
        text = _BEARER.sub(rf"\1{HIDDEN}", text)
    text = _FLAG.sub(lambda found: f"{found[1]}{HIDDEN}" if is_secret(found[1].strip().lstrip("-")) else found[0], text)
    return _hide_assigned(text)


def _hide_assigned(text: str) -> str:
    parts = []
    at = 0
    # In lower case, of the same length: that of this letter would be two.
    for found in _NAMED.finditer(text.replace("\u0130", "I").lower()):
        before = re.split(r"[^\w.-]", text[max(0, found.start() - 64) : found.start()])[-1]
        name = before + text[found.start() : found.end(1)]
        if found.start() < at or not is_secret(name):
            continue
        # Only what the decision needs: the whole value is read where it goes, so that nothing is read often.
        begin = text[found.end() : found.end() + 100]
        colon = found[0].rstrip().endswith(":")
        prose = colon and name.lower() in _PROSE and not re.match(r"""["'[]?[^\s,;&"'}\]]*\d""", begin)
        variable = name.lower() in _VARIABLES and not re.match(r"""["']?[\w%+/=.~-]{16,}+(?!\()""", begin)
        if not prose and not variable and (value := _VALUE.match(text, found.end())):
            parts += [text[at : value.start()], HIDDEN]
            at = value.end()
    return "".join([*parts, text[at:]])


def redact_command(argv: list[str]) -> list[str]:
    """A command line without secrets: ``--hub_token x`` and ``--hub_token=x`` lose their value."""
    shown = []
    hide = False
    for word in argv:
        flag, equals, value = word.partition("=")
        secret = flag.startswith("-") and is_secret(flag.lstrip("-"))
        plain = f"{flag}={redact(value)}" if flag.startswith("-") and equals else redact(word)
        shown.append(HIDDEN if hide else f"{flag}={HIDDEN}" if secret and equals else plain)
        hide = secret and not equals
    return shown


def public_path(path: str) -> str:
    """A path without the folders above it, which name people and machines. A Hub id stays."""
    return Path(path).name if os.path.isabs(path) or path.startswith("~") else path
