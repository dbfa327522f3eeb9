"""What comes with the package beside its code, found by name: configurations of accelerate, and example recipes.

In a checkout these are the folders ``accelerate_configs`` and ``examples`` beside the package; a wheel holds both
within the package.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from basis_rl.names import did_you_mean

_PACKAGE = Path(__file__).parent
_ROOT = _PACKAGE if (_PACKAGE / "accelerate_configs").is_dir() else _PACKAGE.parent
# Folders of ``examples`` whose module `run` makes the model of their recipes and trains it, the first one by default.
EXAMPLES = ("quickstart", "tools", "environments", "smollm2")


def offer_examples(*, also_over_others: bool = False) -> None:
    """From a wheel, let ``examples`` be imported by the name that it has in a checkout.

    Args:
        also_over_others: even if the working directory has a folder of that name.
    """
    if _ROOT == _PACKAGE and (also_over_others or not Path("examples").is_dir()):
        sys.modules["examples"] = importlib.import_module("basis_rl.examples")


def accelerate_configs() -> dict[str, Path]:
    """Name -> file: ``zero3``."""
    return {path.stem: path for path in sorted((_ROOT / "accelerate_configs").glob("*.yaml"))}


def recipes() -> dict[str, Path]:
    """Name -> file: ``papers/basis-qwen3-4b``."""
    folder = _ROOT / "examples"
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.glob("*/*.yaml"))}


def accelerate_config(name: str) -> Path:
    """The file that `name` stands for: a path, or else a shipped configuration (``zero3``).

    Raises:
        ValueError: neither.
    """
    return _find(name, "accelerate_configs", accelerate_configs(), "configuration of accelerate")


def recipe(name: str) -> Path:
    """The file that `name` stands for: a path, or else a shipped recipe (``papers/basis-qwen3-4b``).

    Raises:
        ValueError: neither.
    """
    return _find(name, "examples", recipes(), "recipe")


def _find(name: str, folder: str, shipped: dict[str, Path], what: str) -> Path:
    if Path(name).is_file():
        return Path(name)
    bare = name.removeprefix(f"{folder}/").removesuffix(".yaml")
    if bare in shipped:
        return shipped[bare]
    raise ValueError(
        f"There is no {what} '{name}': it is neither a file nor one that comes with basis-rl ({', '.join(shipped)})."
        f"{did_you_mean(bare, shipped)}"
    )
