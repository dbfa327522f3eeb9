"""Without a network the Hub's client retries for half a minute per file; this finds out once, within seconds."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from basis_rl.names import FORMATS
from basis_rl.recipe.words import peek, read_words

# Seconds to wait for the Hub's address.
_TIMEOUT = 3.0
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def go_offline_if_unreachable(command: str, argv: Sequence[str]) -> None:
    """Set ``HF_HUB_OFFLINE`` where a command names something of the Hub, and the Hub cannot be reached.

    What is in the cache is then used at once, and what is not is an error at once. Must be called before the Hub's
    client is imported. A run that pushes stays online: the Hub may be back at its end.
    """
    if "HF_HUB_OFFLINE" in os.environ or not asks_the_hub(command, argv) or can_be_reached():
        return
    # The client reads this variable once, when it is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        text = "The Hub cannot be reached, so only what is in its cache is used (HF_HUB_OFFLINE=1)."
        print(f"basis-rl: note: {text}", file=sys.stderr)


def asks_the_hub(command: str, argv: Sequence[str]) -> bool:
    """Whether the model or the dataset of a command is on the Hub, and nothing is pushed there.

    Raises:
        ValueError: a recipe that cannot be read.
    """
    if command in ("init", "eval"):
        # Their default data is on the Hub.
        return True
    words = read_words(argv)
    keys = ("model_name_or_path", "dataset_name", "push_to_hub")
    given = {key: words.config.get(key) for key in keys} | peek(words.arguments, keys)[0]
    pushes = str(given.pop("push_to_hub") or False).lower() not in ("false", "no", "0")
    names = [str(name) for name in given.values() if name]
    local = [Path(name).exists() or ":" in name or Path(name).suffix in FORMATS for name in names]
    return not pushes and not all(local)


def can_be_reached() -> bool:
    """Whether the Hub's address answers within three seconds. With a proxy this is not known, and assumed."""
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        with socket.create_connection((url.hostname or "", port), _TIMEOUT):
            return True
    except (OSError, ValueError):
        return False
