"""The benchmarks of mathematics: where each is, and how models are asked on it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from basis_rl.data import DataArguments, load_prompts
from basis_rl.names import did_you_mean, file_format
from basis_rl.rewards import gold_answer
from basis_rl.rewards.golds import invalid_golds, without_invalid_golds
from basis_rl.text import BOXED


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Args:
        data: where the problems are (fields of `DataArguments`; columns that are not named are found).
        num_rollouts: per problem; their mean is avg@n.
        temperature: 0 is greedy.
        top_p: of the sampling.
        level_column: the column by whose values results are broken down.
        gold: replacements (pattern, by what) on the gold answer, whose notation Math-Verify does not read.
    """

    data: Mapping[str, Any]
    num_rollouts: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    level_column: str | None = None
    gold: Sequence[tuple[str, str]] = ()


# Small sets: the mean of many rollouts. These settings are the ones most models publish their figures with.
SAMPLED: Mapping[str, Any] = {"num_rollouts": 32, "temperature": 0.6, "top_p": 0.95}
# Columns by which results are broken down where a benchmark names none.
_LEVELS = ("level", "difficulty", "subfield")

BENCHMARKS: dict[str, Benchmark] = {
    "aime24": Benchmark({"dataset_name": "HuggingFaceH4/aime_2024"}, **SAMPLED),
    "aime25": Benchmark({"dataset_name": "math-ai/aime25", "dataset_train_split": "test"}, **SAMPLED),
    "amc23": Benchmark({"dataset_name": "math-ai/amc23", "dataset_train_split": "test"}, **SAMPLED),
    "hmmt25": Benchmark({"dataset_name": "MathArena/hmmt_feb_2025"}, **SAMPLED),
    "math500": Benchmark({"dataset_name": "HuggingFaceH4/MATH-500", "dataset_train_split": "test"}),
    "minerva": Benchmark(
        {"dataset_name": "math-ai/minervamath", "dataset_train_split": "test"},
        gold=(
            (r"^([-+]?\d+(?:\.\d+)?)e([-+]?\d+)$", r"\1 \\times 10^{\2}"),
            (r"(\d)\./(\d)", r"\1/\2"),
            (r"\bnp\.", r"\\"),
        ),
    ),
    "olympiadbench": Benchmark(
        {
            "dataset_name": "Hothan/OlympiadBench",
            "dataset_config": "OE_TO_maths_en_COMP",
            "context_column": "context",
            "solution_column": "final_answer",
        },
        level_column="subfield",
    ),
    "gsm8k": Benchmark({"dataset_name": "openai/gsm8k", "dataset_config": "main", "dataset_train_split": "test"}),
}


@dataclass(frozen=True)
class Problems:
    """A loaded benchmark: columns ``prompt``, ``solution`` (the bare gold), ``prompt_id``, ``level`` (text or None).

    The other columns are those of the dataset.
    """

    name: str
    benchmark: Benchmark
    dataset: Dataset


def find_benchmark(item: str) -> tuple[str, Benchmark]:
    """Name and benchmark of ``NAME``, ``NAME=SOURCE`` (its problems from elsewhere), or the path of a file.

    SOURCE is what ``dataset_name`` may be: a file, a Hub id, ``reasoning_gym:NAME``. A NAME that is not registered
    is your own benchmark, with one greedy answer per problem.

    Raises:
        ValueError: no such benchmark.
    """
    name, equals, source = item.partition("=")
    if not equals and file_format(item):
        name = Path(item.removesuffix(".gz")).stem
        source = item
    if not source:
        if name not in BENCHMARKS:
            raise ValueError(
                f"Unknown benchmark '{item}'.{did_you_mean(item, BENCHMARKS)} Known: {', '.join(BENCHMARKS)}; or the "
                "path of a file (.json, .jsonl, .parquet, .csv, .tsv), or NAME=SOURCE."
            )
        return name, BENCHMARKS[name]
    known = BENCHMARKS.get(name, Benchmark({}))
    # They describe the original, not the source that takes its place.
    data = {k: v for k, v in known.data.items() if k not in ("dataset_config", "dataset_train_split")}
    return name, replace(known, data={**data, "dataset_name": source})


def load_benchmark(item: str, data: DataArguments, *, conversational: bool, limit: int | None = None) -> Problems:
    """The problems of a benchmark (`find_benchmark`), put to the model as `data` says: template, system prompt.

    Raises:
        ValueError: no such benchmark, or one that cannot be loaded.
    """
    name, benchmark = find_benchmark(item)
    asked = DataArguments(
        prompt_template=data.prompt_template or BOXED,
        system_prompt=data.system_prompt,
        on_missing_gold=data.on_missing_gold,
        max_train_samples=limit,
        **benchmark.data,
    )
    return _problems(name, benchmark, load_prompts(asked, conversational=conversational))


def load_own(data: DataArguments, *, conversational: bool, limit: int | None, reads: Collection[str]) -> Problems:
    """The problems of your own that training holds out; all of them if it holds out none.

    Args:
        data: of the training, with ``test_fraction`` or ``dataset_test_split`` if problems are held out.
        conversational: see `load_prompts`.
        reads: the columns that the reward function reads.
        limit: the number of problems; None for all, of a training split at most ``max_train_samples``.

    Raises:
        ValueError: see `load_prompts`.
    """
    held_out = bool(data.test_fraction or data.dataset_test_split)
    # As in training, where it does not limit the split to evaluate on.
    of_training = None if data.dataset_test_split else data.max_train_samples
    asked = replace(data, max_train_samples=limit or of_training)
    last = re.split(r"[/:]", data.dataset_name.removesuffix(".gz"))[-1]
    # A glob is no name of a file.
    name = re.sub(r"[^\w.+-]+", "_", last.removesuffix(Path(last).suffix))
    counting = {*reads, "solution"}
    gold = "solution" in reads
    loaded = load_prompts(asked, conversational=conversational, held_out=held_out, reads=counting, gold=gold)
    return _problems(name, Benchmark({"dataset_name": data.dataset_name}), loaded)


def _problems(name: str, benchmark: Benchmark, loaded: Dataset) -> Problems:
    levels = (benchmark.level_column,) if benchmark.level_column else _LEVELS
    level = next((column for column in levels if column in loaded.column_names), None)
    return Problems(name, benchmark, Dataset.from_list([_row(row, benchmark, level) for row in loaded]))


def _row(row: dict[str, Any], benchmark: Benchmark, level: str | None) -> dict[str, Any]:
    # There is none where no reward reads one.
    gold: Any = row.get("solution")
    gold = gold_answer(gold) if isinstance(gold, str) else gold
    for pattern, by in benchmark.gold:
        gold = re.sub(pattern, by, gold)
    value = row.get(level) if level else None
    # A column with gaps is read as floats: 3.0 is level 3.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return {**row, "solution": gold, "level": None if value is None else str(value)}


def checked(problems: Problems, reward: Any, on_invalid_gold: str) -> Problems:
    """The problems without those whose gold the reward knows to be impossible (`invalid_golds`).

    Raises:
        ValueError: there are such problems, and `on_invalid_gold` is not 'drop'; or all of them are.
    """
    found = invalid_golds(reward, problems.dataset)
    if not found:
        return problems
    if on_invalid_gold == "drop" and len(found) == len(problems.dataset):
        raise ValueError(f"{problems.name}: no gold verifies against itself. Is it the right column?")
    way_out = None if on_invalid_gold == "drop" else "set --on_invalid_gold drop"
    valid = without_invalid_golds(problems.dataset, [reward], [found], way_out, problems.name)
    return replace(problems, dataset=valid)
