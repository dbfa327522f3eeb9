"""Datasets in, prompts with stable ids out."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, load_dataset
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from basis_rl.data.rows import bare_problem, gold_text, is_single_turn, problem_text
from basis_rl.identity import prompt_id
from basis_rl.names import FORMATS, check_file, option, require_extra

PROMPT_COLUMNS = ("prompt", "problem", "question", "Problem", "Question")
# A column of answers before one of worked solutions; a dot goes into a column of records.
SOLUTION_COLUMNS = (
    "answer",
    "final_answer",
    "reward_model.ground_truth",
    "ground_truth",
    "solution",
    "Answer",
    "Solution",
)
_GYM = "reasoning_gym:"
# Read by `basis_rl.rewards.ReasoningGymReward`.
GYM_COLUMN = "reasoning_gym"
# Names by which TRL hands reward functions something else: a column would be lost, or given twice.
TAKEN = frozenset({"prompts", "completions", "trainer_state", "log_extra", "log_metric"})
IMAGES = frozenset({"image", "images"})


@dataclass
class DataArguments:
    r"""Where the problems come from, and how they are put to the model."""

    dataset_name: str = option("", "A Hub id, a .json, .jsonl, .parquet or .csv file, or `reasoning_gym:NAME`.")
    dataset_config: str | None = option(None, "The configuration name of a Hub dataset.")
    dataset_train_split: str = option("train", "The split to train on.")
    dataset_test_split: str | None = option(None, "The split to evaluate on; by default what test_fraction holds out.")
    dataset_kwargs: dict[str, Any] | str = option(None, "Arguments of reasoning-gym (size, seed, ...).", factory=dict)
    prompt_column: str | None = option(
        None, f"The column of the problem. The default is the first of {', '.join(PROMPT_COLUMNS)}."
    )
    solution_column: str | None = option(
        None, f"The column of the gold. The default is the first of {', '.join(SOLUTION_COLUMNS)}."
    )
    solution_pattern: str | None = option(
        None,
        r"A regular expression whose first group is the gold, such as 'Answer:\s*(.+)'. Without one, GSM8K's "
        "mark '#### 72' is recognised.",
    )
    solution_list: str = option("all", "Of a gold that is a list, 'all' entries are required, or 'any' one is right.")
    context_column: str | None = option(None, "The column of a text to put before the problem, such as a passage.")
    strip_instructions: bool = option(True, "With prompt_template, removes DAPO's and verl's answer instructions.")
    on_missing_gold: str = option("error", "What happens to problems without a gold answer: 'error' or 'drop'.")
    prompt_template: str | None = option(
        None,
        "The user's turn, in which `{prompt}` stands for the problem, such as '{prompt}' or '{prompt} Answer in "
        "\\boxed{}.'; none unsets one. The default is the prompts of the dataset as they are: conversations, or texts "
        "without the chat template; benchmarks are asked for a \\boxed{}.",
    )
    system_prompt: str | None = option(
        None, "The system message in place of the dataset's own; none unsets one. A text becomes the user's turn."
    )
    keep_columns: list[str] | None = option(None, "The columns to keep besides prompt and gold. The default is all.")
    max_train_samples: int | None = option(None, "The number of problems that are kept, from the start of the dataset.")
    test_fraction: float = option(0.0, "The share of problems held out from training, by a hash of the problem.")

    def __post_init__(self) -> None:
        # The command line has no other word that unsets a key of the recipe.
        for key in ("prompt_template", "system_prompt"):
            if str(getattr(self, key)).lower() in ("none", "null"):
                setattr(self, key, None)


def load_prompts(
    data: DataArguments, *, conversational: bool, held_out: bool = False, reads: Collection[str] = ("solution",)
) -> Dataset:
    """The training problems (or with `held_out` the others): ``prompt``, ``solution``, ``prompt_id``, all columns.

    ``prompt`` is what the dataset has; a template or system prompt makes messages of it if `conversational`, else text.
    ``prompt_id`` is that of the bare problem, so that it does not depend on template or system prompt, and of those of
    the other columns that rewards read (`reads`). A row with an id that an earlier one has is dropped, or if its prompt
    differs has the id of its whole prompt; the text alone decides what is held out, which is ``dataset_test_split`` if
    there is one. How problems and golds are read from cells: `basis_rl.data.rows`. ``info.description`` says in words
    what was read.

    Raises:
        ValueError: dataset, column or pattern that does not exist or fit; says which, of what, and what to set.
    """
    _check(data)
    if held_out and data.dataset_test_split:
        data = replace(data, dataset_train_split=data.dataset_test_split, dataset_test_split=None)
        held_out = False
    dataset = load_rows(data)
    rows, read = _read(dataset, data, conversational, held_out, reads)
    if not rows:
        which = "held-out problem (set test_fraction or dataset_test_split)" if held_out else "training problem"
        raise ValueError(f"'{data.dataset_name}' has no {which}.")
    made = Dataset.from_list([row for _, row in rows])
    said = f"{read}. {_presented(data, made[0]['prompt'])}"
    if kept := _kept(dataset, data):
        with _without_bars():
            beside = dataset.select([index for index, _ in rows]).select_columns(kept)
            made = concatenate_datasets([made, beside.flatten_indices(keep_in_memory=True)], axis=1)
    made.info.description = said
    return made


def _read(
    dataset: Dataset, data: DataArguments, conversational: bool, held_out: bool, reads: Collection[str]
) -> tuple[list[tuple[int, dict[str, Any]]], str]:
    """The rows that stay, by their index in the dataset, with prompt, gold and id; and from where these are read."""
    flat = dataset.flatten()
    prompts = _column(flat, data, "prompt_column", PROMPT_COLUMNS)
    # The library's type for a column whose cells are of several kinds.
    if type(flat.features[prompts]).__name__ == "Json":
        mixed = f"'{data.dataset_name}': column '{prompts}' has texts in some rows and conversations in others"
        raise ValueError(mixed + ". Make them all conversations: [{'role': 'user', 'content': TEXT}].")
    solutions = _column(flat, data, "solution_column", SOLUTION_COLUMNS)
    context = _column(flat, data, "context_column", ()) if data.context_column else None
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    missing = 0
    again = 0
    counted = [column for column in _kept(dataset, data) if column in reads]
    others = _rows(dataset, counted) if counted else repeat(dict[str, Any]())
    cells = _rows(flat, [prompts, solutions, *([context] if context else [])])
    for index, (row, other) in enumerate(zip(cells, others, strict=False)):
        cell = row[prompts]
        before = f"{row[context].strip()}\n\n" if context and row[context] else ""
        problem = before + _problem(cell, data, prompts, index)
        # The first 32 bits of the id, a hash, are as good as a random number that stays.
        drawn = int(prompt_id(problem)[:8], 16) / 16**8
        if (drawn < data.test_fraction) == held_out:
            gold = _golds(row[solutions], data, solutions, index)
            if gold is None or gold == []:
                missing += 1
                continue
            columns = {**({"solution": gold} if "solution" in reads else {}), **other}
            prompt = prompt_of(cell, data, before, conversational=conversational)
            name = prompt_id(problem if is_single_turn(cell) else cell, columns)
            # Another prompt around the same problem is not a repetition: the whole prompt tells the two apart.
            if name in found and found[name][1]["prompt"] != prompt:
                name = prompt_id(before + cell if isinstance(cell, str) else cell, columns)
            again += name in found
            found.setdefault(name, (index, {"prompt": prompt, "solution": gold, "prompt_id": name}))
        if data.max_train_samples is not None and len(found) >= data.max_train_samples:
            break
    if missing:
        logging.getLogger(__name__).warning("'%s': left out %d problems without a gold.", data.dataset_name, missing)
    read = f"'{data.dataset_name}', {len(dataset)} rows: the problem from column '{prompts}', the gold from"
    read += f" '{solutions}'"
    read += f"; {again} are left out, whose problem an earlier row has" if again else ""
    read += "; its column 'prompt_id' is replaced by ids of the problems" if "prompt_id" in dataset.column_names else ""
    return list(found.values()), read


def _presented(data: DataArguments, prompt: Any) -> str:
    """In a sentence what is made of the prompts of the dataset."""
    said = f"prompt_template {data.prompt_template!r} is put around each problem"
    if data.prompt_template is None:
        kind = "texts, without the chat template," if isinstance(prompt, str) else "conversations"
        said = f"The prompts are {kind} as the dataset has them"
    return said + (", and system_prompt is the system message" if data.system_prompt else "")


def _kept(dataset: Dataset, data: DataArguments) -> list[str]:
    """The columns that stay as they are: not those that TRL has another meaning for, unless they are asked for."""
    if unknown := [column for column in data.keep_columns or [] if column not in dataset.column_names]:
        known = dataset.column_names
        raise ValueError(f"keep_columns: '{data.dataset_name}' has no column '{unknown[0]}', only {known}.")
    own = {"prompt", "solution", "prompt_id"}
    if data.keep_columns is not None:
        return [column for column in data.keep_columns if column not in own]
    return [column for column in dataset.column_names if column not in own | TAKEN | IMAGES]


def _check(data: DataArguments) -> None:
    if data.prompt_template is not None and "{prompt}" not in data.prompt_template:
        raise ValueError("prompt_template must hold `{prompt}`, the place of the problem.")
    if data.dataset_test_split and data.test_fraction:
        raise ValueError("dataset_test_split and test_fraction both name problems to evaluate on: set one of the two.")
    if not 0 <= data.test_fraction < 1:
        raise ValueError(f"test_fraction must be in [0, 1), got {data.test_fraction}.")
    if data.solution_list not in ("all", "any"):
        raise ValueError(f"solution_list must be 'all' or 'any', got '{data.solution_list}'.")
    if data.on_missing_gold not in ("error", "drop"):
        raise ValueError(f"on_missing_gold must be 'error' or 'drop', got '{data.on_missing_gold}'.")


def _rows(dataset: Dataset, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The cells of these columns, in batches: sets have millions of rows."""
    for batch in dataset.select_columns(list(dict.fromkeys(columns))).with_format("arrow").iter(1000):
        yield from batch.to_pylist()


def prompt_of(cell: Any, data: DataArguments, before: str = "", *, conversational: bool) -> str | list[dict[str, Any]]:
    """The prompt of a row: its cell, with the template around the last turn of a user if `data` has one.

    `before` goes before the problem. Template and system prompt make a conversation if `conversational`, else a text
    whose first paragraph is the system message; without them a text stays a text.

    Raises:
        ValueError: a conversation of several turns would have to become a text.
    """
    template = data.prompt_template
    system = data.system_prompt
    if template is None and not system and (isinstance(cell, str) or not before):
        return before + cell if isinstance(cell, str) else cell
    messages = [{"role": "user", "content": cell}] if isinstance(cell, str) else list(cell)
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    if template is not None or before:
        text = bare_problem([messages[last]], strip_instructions=template is not None and data.strip_instructions)
        asked = (template or "{prompt}").replace("{prompt}", before + (text or ""))
        messages[last] = {**messages[last], "content": asked}
    if system:
        others = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": system}, *others]
    if conversational or (template is None and not isinstance(cell, str)):
        return messages
    if not is_single_turn(cell):
        reason = "a conversation of several turns is no text, and the model has no chat template"
        raise ValueError(f"prompt_template: {reason}. Take a model with one.")
    texts = [message["content"] for message in messages]
    parts = [text if isinstance(text, str) else problem_text([{"role": "user", "content": text}]) for text in texts]
    return "\n\n".join(parts)


def load_rows(data: DataArguments) -> Dataset:
    """The rows of the dataset as they are.

    Raises:
        ValueError: it cannot be loaded.
    """
    name = data.dataset_name
    if not name:
        raise ValueError("dataset_name is missing: a Hub id, a .json/.jsonl/.parquet/.csv file, or reasoning_gym:NAME.")
    if name.startswith(_GYM):
        return _reasoning_gym(name.removeprefix(_GYM), data.dataset_kwargs)
    if Path(name).suffix in FORMATS:
        return _load_file(Path(name))
    try:
        return load_dataset(name, data.dataset_config, split=data.dataset_train_split)
    except ValueError:
        raise
    except Exception as error:
        said = f"could not be loaded ({type(error).__name__}: {str(error)[:200]})"
        forms = f"a Hub id, the path of a file ({', '.join(FORMATS)}), or {_GYM}NAME"
        raise ValueError(f"dataset_name: '{name}' {said}. It must be {forms}.") from error


def _load_file(path: Path) -> Dataset:
    """The rows of a file.

    Raises:
        ValueError: it is not there, is empty, or cannot be read, with the reason and where it says so the place.
    """
    check_file(str(path))
    with path.open("rb") as file:
        empty = not file.read(1000).strip()
    try:
        with _without_bars():
            return load_dataset(FORMATS[path.suffix], data_files=str(path), split="train")
    except Exception as error:
        if empty or "corresponds to no data" in str(error):
            raise ValueError(f"dataset_name: the file '{path}' holds no rows.") from error
        reason: BaseException = error
        # The error of datasets itself says only that something failed.
        while reason.__cause__ is not None:
            reason = reason.__cause__
        said = f"{path.suffix.removeprefix('.')} ({type(reason).__name__}: {' '.join(str(reason).split())[:300]})"
        raise ValueError(f"dataset_name: '{path}' cannot be read as {said}.") from error


@contextmanager
def _without_bars() -> Iterator[None]:
    """Within it `datasets` shows no bars: reading a file takes a moment."""
    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def _reasoning_gym(name: str, kwargs: dict[str, Any] | str) -> Dataset:
    """Questions and answers of a procedural set, and in the column ``reasoning_gym`` what its scorer needs of each.

    Sets that only have a scorer, such as ``rush_hour``, have empty answers.
    """
    require_extra("reasoning_gym", f"dataset_name: reasoning_gym:{name}")
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    options = {"seed": 0, **(json.loads(kwargs) if isinstance(kwargs, str) else kwargs)}
    given = dict(options)
    try:
        if name == "composite":
            given["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **spec}) for spec in options["datasets"]]
            options["datasets"] = [vars(spec) for spec in given["datasets"]]
        generated = reasoning_gym.create_dataset(name, **given)
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise ValueError(f"dataset_name: reasoning-gym cannot make '{name}' from {options}: {error}") from error
    rows = []
    for index, row in enumerate(generated):
        try:
            # The entry itself saves the scorer making it again.
            entry = {"entry": _with_tuples(row)}
        except TypeError:
            # It holds more than JSON and tuples can say: the scorer makes it again, and compares the question.
            digest = hashlib.sha256(row["question"].encode()).hexdigest()[:16]
            entry = {"index": index, "question_sha256": digest}
        cell = json.dumps({"dataset": name, "config": options, **entry})
        rows.append({"question": row["question"], "answer": row["answer"] or "", GYM_COLUMN: cell})
    return Dataset.from_list(rows)


def _with_tuples(value: Any) -> Any:
    """JSON that keeps tuples, as ``{"__tuple__": [...]}``: scorers tell them from lists."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_with_tuples(item) for item in value]
    if type(value) is tuple:
        return {"__tuple__": [_with_tuples(item) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _with_tuples(item) for key, item in value.items()}
    raise TypeError(f"a {type(value).__name__} is not JSON")


def _column(dataset: Dataset, data: DataArguments, key: str, candidates: Sequence[str]) -> str:
    chosen: str | None = getattr(data, key)
    if chosen is not None and chosen not in dataset.column_names:
        raise ValueError(f"{key}: '{data.dataset_name}' has no column '{chosen}', only {dataset.column_names}.")
    found = [chosen] if chosen else [name for name in candidates if name in dataset.column_names]
    if not found:
        has = f"'{data.dataset_name}' has none of the columns {candidates}, only {dataset.column_names}"
        raise ValueError(f"{has}; say which one with {key}.")
    return found[0]


def _problem(value: Any, data: DataArguments, column: str, index: int) -> str:
    problem = bare_problem(value, strip_instructions=data.strip_instructions)
    if problem is None:
        cell = f"Row {index} of '{data.dataset_name}': column '{column}' holds {type(value).__name__}"
        needs = "neither a text nor a conversation with a user's turn. Set prompt_column"
        raise ValueError(f"{cell} {str(value)[:60]!r}, {needs}.")
    return problem


def _golds(value: Any, data: DataArguments, column: str, index: int) -> str | list[str] | None:
    """The cell of ``solution``: one text, or with ``solution_list: any`` a list, of one text or more."""
    if data.solution_list == "all":
        return _gold(value, data, column, index)
    golds = [_gold(each, data, column, index) for each in (value if isinstance(value, list) and value else [value])]
    return [gold for gold in golds if gold is not None]


def _gold(value: Any, data: DataArguments, column: str, index: int) -> str | None:
    """The gold as text; None where there is none and such rows are to be dropped."""
    row = f"{index} of '{data.dataset_name}'"
    pattern = data.solution_pattern
    # NaN is how Arrow and pandas write a number that is missing.
    missing = value is None or value != value
    text = None if missing else gold_text(value) if pattern is None else str(value)
    if text is None:
        if data.on_missing_gold == "drop":
            return None
        way_out = "Remove such rows, set on_missing_gold: drop, or set solution_column"
        raise ValueError(f"Row {row} has no gold: column '{column}' holds {value}. {way_out}.")
    if pattern is None:
        return text
    try:
        match = re.search(pattern, text)
    except re.error as error:
        raise ValueError(f"solution_pattern {pattern!r} is not a regular expression: {error}.") from error
    if match is None or match.lastindex is None:
        cell = f"row {row}, column '{column}': {text[-80:]!r}"
        raise ValueError(f"solution_pattern {pattern!r} finds no group in {cell}.")
    return match.group(1).strip()
