"""Builds the device type "standin" (``standin.cpp``) and registers it with torch, for the rest of the process."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "standin"
SOURCE = Path(__file__).with_name("standin.cpp")
# Of this checkout, and ignored by git.
CACHE = Path(__file__).resolve().parents[3] / "build" / "standin"


def compiler() -> str | None:
    """The C++ compiler, by ``CXX`` or the usual name; None where there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build() -> Path:
    """The compiled library; compiled by the first process that asks, for which others wait.

    Raises:
        RuntimeError: there is no compiler, or it failed; the message has its last output.
    """
    using = compiler()
    if using is None:
        raise RuntimeError("The stand-in accelerator needs a C++ compiler: install g++, or set CXX to another one.")
    identity = hashlib.sha256(
        SOURCE.read_bytes() + f"{torch.__version__} {torch.__file__}".encode() + Path(__file__).read_bytes()
    ).hexdigest()
    library = CACHE / f"{identity[:16]}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        # The system releases this lock when a process ends, however it ends.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(using, library)
    return library


def _compile(using: str, library: Path) -> None:
    unfinished = library.with_suffix(".unfinished")
    includes = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()] + ["-ltorch", "-ltorch_cpu", "-lc10"]
    # Most of the time goes into torch's headers; optimizing a few dozen lines would double it.
    options = ["-std=c++20", "-O0", "-w", "-fPIC", "-shared"]
    command = [using, *options, *includes, str(SOURCE), "-o", str(unfinished), *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{using} could not compile {SOURCE}: {done.stderr[-3000:]}")
    # A killed compiler leaves no library that looks whole.
    unfinished.replace(library)


def register() -> None:
    """Register the device type with torch; a second call changes nothing. Build it first where that is not done.

    A process can have only one device type of this kind, and cannot lose it again.
    """
    if f"torch.{NAME}" in sys.modules:
        return
    torch.ops.load_library(str(build()))
    torch.ops.standin.register_hooks()
    torch.utils.rename_privateuse1_backend(NAME)
    module = _module()
    sys.modules[module.__name__] = module
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=None)


def _module() -> types.ModuleType:
    """``torch.standin``, with what ``torch.cuda`` has and torch and accelerate ask of any device."""
    generator: torch.Generator = torch.ops.standin.default_generator()
    contents: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(contents)
    return module
