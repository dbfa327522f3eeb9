"""What `python -m benchmarks.gpu` needs: a GPU, packages (some can be carried to the machine), a file of results."""

from __future__ import annotations

import datetime
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

# `make gpu-wheels` does not collect the first ones, which have large or many dependencies of their own.
ON_THE_MACHINE = ("torch", "transformers", "accelerate", "pandas", "pyarrow", "psutil", "yaml", "jinja2", "sympy")
CARRIED = (
    "trl",
    "datasets",
    "dill",
    "multiprocess",
    "xxhash",
    "math_verify",
    "latex2sympy2_extended",
    "antlr4",
    "pytest",
)


def device_name(cpu: bool) -> str:
    """``NVIDIA H200``, for example, or ``cpu``. Another process asks, so that this one holds no memory of the GPU."""
    if cpu:
        return "cpu"
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if not asked.stdout.strip():
        raise SystemExit("There is no GPU here. Run with `--cpu` to check that the stages work.")
    return asked.stdout.strip().splitlines()[-1]


def install(folder: Path) -> None:
    """Install all wheels of a folder, without the network."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise SystemExit(f"There are no wheels in {folder}. Collect them with `make gpu-wheels`.")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--break-system-packages"]
    subprocess.run([*command, *wheels], check=True)
    importlib.invalidate_caches()


def check_packages() -> None:
    """End with a message that names the packages that are missing, and the way out."""
    missing = [module for module in (*ON_THE_MACHINE, *CARRIED) if importlib.util.find_spec(module) is None]
    if missing:
        raise SystemExit(
            f"This Python lacks {', '.join(missing)}. {', '.join(ON_THE_MACHINE)}, with all that they require, must be "
            "installed on the machine. Collect the others elsewhere with `make gpu-wheels`, and run again with "
            "`--wheels build/gpu-wheels`."
        )


def results_file(folder: Path, device: str) -> Path:
    """The path of the results: yesterday's where there are any, for a run may go past midnight, else today's."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    today = datetime.date.today()
    dated = [folder / f"{slug}_{day}.json" for day in (today, today - datetime.timedelta(days=1))]
    return next((path for path in dated if path.is_file()), dated[0])
