"""Datasets in, prompts with stable ids out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetInfo, load_dataset

PROMPT_COLUMNS = ("prompt", "problem", "question", "Problem", "Question")
SOLUTION_COLUMNS = ("answer", "solution", "final_answer", "Answer", "Solution")
_GYM = "reasoning_gym:"
_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class DataArguments:
    r"""Where the problems come from, and how they are put to the model."""

    dataset_name: str = field(
        default="",
        metadata={"help": "Hub id, path of a .json, .jsonl, .parquet or .csv file, or `reasoning_gym:NAME`."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name of a Hub dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_kwargs: dict[str, Any] | str = field(
        default_factory=dict, metadata={"help": "Arguments of the reasoning-gym generator (size, seed, ...), as JSON."}
    )
    prompt_column: str | None = field(
        default=None, metadata={"help": f"Column of the problem; default: the first of {', '.join(PROMPT_COLUMNS)}."}
    )
    solution_column: str | None = field(
        default=None, metadata={"help": f"Column of the gold; default: the first of {', '.join(SOLUTION_COLUMNS)}."}
    )
    solution_pattern: str | None = field(
        default=None,
        metadata={"help": r"Regular expression whose first group is the gold, e.g. '####\s*(.+)' for GSM8K."},
    )
    prompt_template: str = field(
        default="{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
        metadata={"help": "What the model is asked; `{prompt}` stands for the problem."},
    )
    system_prompt: str | None = field(default=None, metadata={"help": "System message of the conversation."})
    keep_columns: list[str] | None = field(
        default=None, metadata={"help": "Further columns to keep as they are, for reward functions."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Keep only the first so many problems."})
    test_fraction: float = field(
        default=0.0,
        metadata={"help": "Share of the problems held out from training, chosen by a hash of the problem."},
    )


def prompt_id(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """16 hex digits that name a problem: SHA-256 of its text, surrounding white space aside.

    `load_prompts` hashes the bare problem, so its ids do not depend on template or system prompt. For a dataset without
    a ``prompt_id`` column the trainer hashes the prompt as it stands; a conversation counts with all its messages.
    """
    text = prompt.strip() if isinstance(prompt, str) else json.dumps(list(prompt), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def problem_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """What is asked: the prompt itself, or what the user says in a conversation (text parts only)."""
    if isinstance(prompt, str):
        return prompt.strip()
    said: list[str] = []
    for message in prompt:
        if message["role"] == "user":
            content = message["content"]
            said += [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    return "\n".join(said).strip()


def load_prompts(data: DataArguments, *, conversational: bool, held_out: bool = False) -> Dataset:
    """The training problems (or with `held_out` the others) with the columns ``prompt``, ``solution``, ``prompt_id``.

    Duplicates of a problem are dropped, the first one stays. ``prompt`` is a list of messages if `conversational`, else
    text. ``info.description`` of the result says in words what was read.

    Raises:
        ValueError: dataset, column or pattern that does not exist or fit; says which, of what, and what to set.
    """
    dataset = _load(data)
    prompts = _column(dataset, data, "prompt_column", PROMPT_COLUMNS)
    solutions = _column(dataset, data, "solution_column", SOLUTION_COLUMNS)
    if "{prompt}" not in data.prompt_template:
        raise ValueError("prompt_template must hold `{prompt}`, the place of the problem.")
    if not 0 <= data.test_fraction < 1:
        raise ValueError(f"test_fraction must be in [0, 1), got {data.test_fraction}.")
    kept = data.keep_columns or []
    for column in kept:
        if column not in dataset.column_names:
            raise ValueError(
                f"keep_columns: '{data.dataset_name}' has no column '{column}', only {dataset.column_names}."
            )
    rows: dict[str, dict[str, Any]] = {}
    for index, (problem, solution) in enumerate(zip(dataset[prompts], dataset[solutions], strict=True)):
        if not isinstance(problem, str) or not problem.strip():
            raise ValueError(
                f"Row {index} of '{data.dataset_name}': column '{prompts}' holds {type(problem).__name__} "
                f"{str(problem)[:60]!r}, not the text of a problem. Set prompt_column."
            )
        name = prompt_id(problem)
        if name not in rows and _is_held_out(name, data.test_fraction) == held_out:
            rows[name] = {
                "prompt": render(problem, data, conversational=conversational),
                "solution": _gold(solution, data, solutions, index),
                "prompt_id": name,
                **{column: dataset[index][column] for column in kept},
            }
        if data.max_train_samples is not None and len(rows) >= data.max_train_samples:
            break
    if not rows:
        which = "held-out problem (set test_fraction)" if held_out else "training problem"
        raise ValueError(f"'{data.dataset_name}' has no {which}.")
    read = (
        f"'{data.dataset_name}', {len(dataset)} rows: the problem from column '{prompts}', the gold from '{solutions}'"
    )
    return Dataset.from_list(list(rows.values()), info=DatasetInfo(description=read))


def render(problem: str, data: DataArguments, *, conversational: bool) -> str | list[dict[str, str]]:
    """The prompt for one problem: template, and system prompt as a message of its own or as the first paragraph."""
    text = data.prompt_template.replace("{prompt}", problem)
    if not conversational:
        return f"{data.system_prompt}\n\n{text}" if data.system_prompt else text
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, {"role": "user", "content": text}]


def _is_held_out(name: str, fraction: float) -> bool:
    return int(name[:8], 16) < fraction * 16**8


def _load(data: DataArguments) -> Dataset:
    name = data.dataset_name
    if not name:
        raise ValueError("dataset_name is missing: a Hub id, a .json/.jsonl/.parquet/.csv file, or reasoning_gym:NAME.")
    if name.startswith(_GYM):
        return _reasoning_gym(name.removeprefix(_GYM), data.dataset_kwargs)
    suffix = Path(name).suffix
    try:
        if suffix in _FORMATS:
            if not Path(name).is_file():
                raise ValueError(f"dataset_name: there is no file '{name}'.")
            return load_dataset(_FORMATS[suffix], data_files=name, split="train")
        return load_dataset(name, data.dataset_config, split=data.dataset_train_split)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"dataset_name: '{name}' could not be loaded ({type(error).__name__}: {str(error)[:200]}). It must be a "
            f"Hub id, the path of a file ({', '.join(_FORMATS)}), or {_GYM}NAME."
        ) from error


def _reasoning_gym(name: str, kwargs: dict[str, Any] | str) -> Dataset:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError("reasoning_gym:NAME needs `pip install basis-rl[reasoning-gym]`.") from error
    options = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
    try:
        generated = reasoning_gym.create_dataset(name, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"dataset_name: reasoning-gym cannot make '{name}' from {options}: {error}") from error
    return Dataset.from_list([{"question": row["question"], "answer": row["answer"]} for row in generated])


def _column(dataset: Dataset, data: DataArguments, key: str, candidates: Sequence[str]) -> str:
    chosen: str | None = getattr(data, key)
    if chosen is not None and chosen not in dataset.column_names:
        raise ValueError(f"{key}: '{data.dataset_name}' has no column '{chosen}', only {dataset.column_names}.")
    found = [chosen] if chosen else [name for name in candidates if name in dataset.column_names]
    if not found:
        raise ValueError(f"'{data.dataset_name}' has none of the columns {candidates}, only {dataset.column_names}; "
                         f"say which one with {key}.")  # fmt: skip
    return found[0]


def _gold(solution: Any, data: DataArguments, column: str, index: int) -> str:
    if solution is None or solution != solution:
        raise ValueError(
            f"Row {index} of '{data.dataset_name}' has no gold: column '{column}' holds {solution}. Remove such rows, "
            "or set solution_column."
        )
    text = str(solution)
    if data.solution_pattern is None:
        return text
    try:
        match = re.search(data.solution_pattern, text)
    except re.error as error:
        raise ValueError(f"solution_pattern {data.solution_pattern!r} is no regular expression: {error}.") from error
    if match is None or match.lastindex is None:
        raise ValueError(
            f"solution_pattern {data.solution_pattern!r} finds no group in row {index} of '{data.dataset_name}', "
            f"column '{column}': {text[-80:]!r}."
        )
    return match.group(1).strip()
