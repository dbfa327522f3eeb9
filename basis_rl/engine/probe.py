"""What a vLLM server says of itself, asked without a client."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerFacts:
    """What is served.

    Attributes:
        models: the names that the server answers to, and what they were loaded from.
        max_model_len: prompt and completion together, in tokens; None where the server does not tell.
    """

    models: tuple[str, ...]
    max_model_len: int | None


def ask_server(url: str, timeout: float = 5.0) -> ServerFacts:
    """Ask ``/health`` and ``/v1/models``.

    Raises:
        OSError: it cannot be reached, or is not healthy (`urllib.error.HTTPError` is one).
        ValueError: what answers is no vLLM server.
    """
    with urllib.request.urlopen(f"{url}/health", timeout=timeout):
        pass
    with urllib.request.urlopen(f"{url}/v1/models", timeout=timeout) as response:
        try:
            cards = json.load(response)["data"]
            names = [card.get(key) for card in cards for key in ("id", "root")]
            lengths = [card["max_model_len"] for card in cards if card.get("max_model_len")]
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"what answers at {url} is no vLLM server ({type(error).__name__}: {error})") from error
    return ServerFacts(tuple(dict.fromkeys(name for name in names if name)), min(lengths, default=None))
