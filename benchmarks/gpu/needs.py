"""What the stages need: what must be on the machine, and what `make gpu-wheels` carries."""

from __future__ import annotations

import importlib.util

# Modules without which nothing runs, with the names of their packages where these differ. `make gpu-wheels` does not
# collect them: torch, transformers and accelerate with all that they require, and pandas and pyarrow are 60 MB alone.
ON_THE_MACHINE = {
    "torch": "", "transformers": "", "accelerate": "", "numpy": "", "pandas": "", "pyarrow": "", "psutil": "",
    "yaml": "PyYAML", "jinja2": "", "sympy": "", "tqdm": "", "safetensors": "",
}  # fmt: skip
# The same, collected by `make gpu-wheels`.
CARRIED = {
    "trl": "", "datasets": "", "dill": "", "multiprocess": "", "xxhash": "", "math_verify": "math-verify",
    "latex2sympy2_extended": "", "antlr4": "antlr4-python3-runtime",
}  # fmt: skip
# Without these, stages or parts of them are skipped and say so. All but vLLM are collected by `make gpu-wheels`.
OPTIONAL = {
    "pytest": "stage tests", "peft": "parts of training and memory", "deepspeed": "parts of sharding",
    "vllm": "stages vllm and server",
}  # fmt: skip


def missing(modules: dict[str, str]) -> list[str]:
    """The packages of those modules that are not installed."""
    return [package or module for module, package in modules.items() if importlib.util.find_spec(module) is None]


def complaint() -> str:
    """Why nothing can run here, and the way out; empty if everything that is needed is there."""
    told = []
    if lacking := missing(ON_THE_MACHINE):
        told.append(f"This Python lacks {', '.join(lacking)}, which must be installed on the machine.")
    if lacking := missing(CARRIED):
        told.append(
            f"This Python lacks {', '.join(lacking)}. Collect them elsewhere with `make gpu-wheels`, and run again with"
            " `--wheels build/gpu-wheels`."
        )
    return " ".join(told)


def notes() -> list[str]:
    """A sentence for each thing that is missing and that only some of the stages need."""
    return [
        f"{module} is not installed: skipped are {what}."
        for module, what in OPTIONAL.items()
        if importlib.util.find_spec(module) is None
    ]
