"""Datasets in, prompts with stable ids out."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, concatenate_datasets, load_dataset
from datasets.utils import disable_progress_bars

from basis_rl.data.choices import Option, how_read, letter_of, lettered, read_options
from basis_rl.data.files import load_files, load_saved
from basis_rl.data.rows import bare_problem, gold_text, is_blank, is_single_turn, problem_text, without_answer
from basis_rl.data.template import as_text, filled, is_jinja, places, read_template
from basis_rl.identity import prompt_id, row_id
from basis_rl.names import FORMATS, as_name, check_word, data_files, did_you_mean, option, require_extra

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
_CHOICES = ("choices", "options")
_GYM = "reasoning_gym:"
# Read by `basis_rl.rewards.ReasoningGymReward`.
GYM_COLUMN = "reasoning_gym"
# Names by which TRL hands reward functions something else: a column would be lost, or given twice.
TAKEN = frozenset({"prompts", "completions", "trainer_state", "log_extra", "log_metric"})
IMAGES = frozenset({"image", "images"})
# Rows for an environment without a dataset.
_SEEDS = 1000


@dataclass
class DataArguments:
    r"""Where the problems come from, and how they are put to the model.

    Raises:
        ValueError: values that contradict each other, or that are out of their range.
    """

    dataset_name: str = option(
        "",
        "A Hub id; a .json, .jsonl, .parquet, .csv or .tsv file, also with .gz, or a list or glob of them; a folder of "
        "`save_to_disk`; or `reasoning_gym:NAME`.",
    )
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
    choices_column: str | None = option(
        None,
        "The options of multiple-choice questions: their column (a list, or a record of texts and labels), or one "
        "column for each: 'A, B, C, D'. They stand below the problem as lines 'A. one', and the gold, as a label, "
        "number or text of one of them, becomes its letter. The default is none, and where prompt_template has "
        f"`{{choices}}` the first of {', '.join(_CHOICES)}.",
    )
    strip_instructions: bool = option(True, "With prompt_template, removes DAPO's and verl's answer instructions.")
    on_missing_gold: str = option("error", "What happens to problems without a gold answer: 'error' or 'drop'.")
    prompt_template: str | None = option(
        None,
        "The user's turn, in which `{prompt}` stands for the problem, `{choices}` for its options and `{column}` for "
        "any other column, such as '{prompt}' or '{prompt} Answer in \\boxed{}.'; or Jinja, also as the path of a "
        ".jinja file; none unsets one. The default is the prompts of the dataset as they are: conversations, or texts "
        "without the chat template; benchmarks are asked for a \\boxed{}.",
    )
    system_prompt: str | None = option(
        None, "The system message in place of the dataset's own; none unsets one. A text becomes the user's turn."
    )
    keep_columns: list[str] | None = option(None, "The columns to keep besides prompt and gold. The default is all.")
    max_train_samples: int | None = option(None, "The number of problems that are kept, from the start of the dataset.")
    test_fraction: float = option(0.0, "The share of problems held out from training, by a hash of the problem.")

    def __post_init__(self) -> None:
        # In a recipe these may be lists.
        self.dataset_name = as_name(self.dataset_name)
        self.choices_column = as_name(self.choices_column) or None
        # The command line has no other word that unsets a key of the recipe.
        for key in ("prompt_template", "system_prompt"):
            if str(getattr(self, key)).lower() in ("none", "null"):
                setattr(self, key, None)
        if self.prompt_template is not None:
            self.prompt_template = read_template(self.prompt_template)
        if self.dataset_test_split and self.test_fraction:
            raise ValueError(
                "dataset_test_split and test_fraction both name problems to evaluate on: set one of the two."
            )
        if not 0 <= self.test_fraction < 1:
            raise ValueError(f"test_fraction must be in [0, 1), got {self.test_fraction}.")
        check_word("solution_list", self.solution_list, ("all", "any"))
        check_word("on_missing_gold", self.on_missing_gold, ("error", "drop"))


def load_prompts(
    data: DataArguments,
    *,
    conversational: bool,
    held_out: bool = False,
    reads: Collection[str] = ("solution",),
    gold: bool = True,
) -> Dataset:
    """The training problems (or with `held_out` the others): ``prompt``, ``solution``, ``prompt_id``, all columns.

    ``prompt`` is what the dataset has; a template or system prompt makes messages of it if `conversational`, else text.
    ``prompt_id`` is that of the bare problem, so that it does not depend on template or system prompt, and of those of
    the other columns that rewards read (`reads`). A row with an id that an earlier one has is dropped, or if its prompt
    differs has the id of its whole prompt; the text alone decides what is held out, which is ``dataset_test_split`` if
    there is one. Rows whose problem is empty are left out. How cells are read: `basis_rl.data.rows`. Without `gold`
    rows need none, and without its column there is no ``solution``. ``info.description`` says in words what was read,
    and in a second line what is odd about rows that have one prompt, if anything is.

    Raises:
        ValueError: dataset, column or pattern that does not exist or fit; says which, of what, and what to set.
    """
    data, held_out = _split(data, held_out)
    dataset = load_rows(data)
    fields = _with_fields(dataset)
    source = _source(fields, data, gold)
    missing = data.on_missing_gold if gold else "drop"
    data = replace(data, prompt_column=source.prompt, on_missing_gold=missing)
    counted = [column for column in _kept(dataset, data) if column in reads]
    rows, read, again = _read(fields, data, source, conversational, held_out, reads, counted)
    _require(rows, data, held_out)
    made = Dataset.from_list([row for _, row in rows])
    unread = _unread_texts(dataset, {*source.columns, *counted, *SOLUTION_COLUMNS})
    read += f"; neither the prompt nor a reward function reads {', '.join(map(repr, unread))}" if unread else ""
    said = f"{read}. {_presented(data, made[0]['prompt'], conversational)}"
    said += _shared_prompts(made["prompt"], list(made["solution"]) if source.gold else [None] * len(made), again)
    if kept := _kept(dataset, data):
        # A bar for a moment's work would only break up the log.
        disable_progress_bars()
        beside = dataset.select([index for index, _ in rows]).select_columns(kept)
        made = concatenate_datasets([made, beside.flatten_indices(keep_in_memory=True)], axis=1)
    made.info.description = said
    return made


def _split(data: DataArguments, held_out: bool) -> tuple[DataArguments, bool]:
    """From where rows are read, and whether it is those that a hash holds out there."""
    if held_out and data.dataset_test_split:
        return replace(data, dataset_train_split=data.dataset_test_split, dataset_test_split=None), False
    return data, held_out


def _require(rows: Sequence[Any], data: DataArguments, held_out: bool) -> None:
    if not rows:
        which = "held-out problem (set test_fraction or dataset_test_split)" if held_out else "training problem"
        raise ValueError(f"'{data.dataset_name}' has no {which}.")


def seed_rows(count: int | None = None) -> Dataset:
    """Rows for an environment that makes its problems itself: the numbers below `count` (1000) in a column ``seed``."""
    return Dataset.from_dict({"seed": list(range(count or _SEEDS))})


def load_tasks(
    data: DataArguments, *, conversational: bool, held_out: bool = False, reads: Collection[str] | None = None
) -> Dataset:
    """The rows that an environment is reset with (or with `held_out` the others): those of the dataset, which needs no
    prompts, and a gold only if it is read; without a dataset `seed_rows`, ``max_train_samples`` of them.

    Args:
        data: where the rows come from.
        conversational, held_out: see `load_prompts`, which reads rows with prompts.
        reads: the columns that rewards and environment read; None for all.

    Raises:
        ValueError: see `load_prompts`.
    """
    data, held_out = _split(data, held_out)
    rows = load_rows(data) if data.dataset_name else seed_rows(data.max_train_samples)
    flat = rows.flatten()
    if column := data.prompt_column or next((name for name in PROMPT_COLUMNS if name in flat.column_names), None):
        if data.prompt_template is None and isinstance(flat[0].get(column), str):
            # An environment adds to the user's turn.
            data = replace(data, prompt_template="{prompt}", strip_instructions=False)
        read = rows.column_names if reads is None else reads
        return load_prompts(data, conversational=conversational, held_out=held_out, reads=read, gold="solution" in read)
    # As in `load_prompts`, an id is as good as a random number.
    drawn = (int(row_id(row, reads)[:8], 16) / 16**8 for row in rows)
    chosen = [index for index, number in enumerate(drawn) if (number < data.test_fraction) == held_out]
    _require(chosen, data, held_out)
    rows = rows.select(chosen[: data.max_train_samples])
    source = f"'{data.dataset_name}'" if data.dataset_name else "numbers, in the column 'seed'"
    rows.info.description = f"The environment is reset with the rows of {source}"
    return rows


@dataclass(frozen=True)
class _Source:
    """The columns that problems are made of; a dot leads into a column of records.

    Attributes:
        gold: whether every row needs one.
        prompt, solution, context: None where there is none.
        choices: one column with all options, or one for each.
        shown: the other columns that the template has places for.
        reading: how golds name an option (`basis_rl.data.choices.READINGS`).
    """

    gold: bool
    prompt: str
    solution: str | None = None
    context: str | None = None
    choices: Sequence[str] = ()
    shown: Sequence[str] = ()
    reading: str = ""

    @property
    def columns(self) -> list[str]:
        """All of them."""
        return [*filter(None, (self.prompt, self.solution, self.context)), *self.choices, *self.shown]

    def options(self, row: Mapping[str, Any], where: str) -> list[Option]:
        """The options of a row; none of one that is no multiple-choice question.

        Raises:
            ValueError: there are columns of options, and they hold none.
        """
        try:
            return read_options([row[column] for column in self.choices]) if self.choices else []
        except ValueError as error:
            raise ValueError(f"choices_column: row {where}: {error}.") from error


def _source(dataset: Dataset, data: DataArguments, gold: bool) -> _Source:
    """Finds the columns, by their names and those in the template.

    Raises:
        ValueError: one is not there, or the template shows no problem, or the gold.
    """
    prompt = _column(dataset, data, "prompt_column", PROMPT_COLUMNS)
    # The library's type for a column whose cells are of several kinds.
    if type(dataset.features[prompt]).__name__ == "Json":
        mixed = f"'{data.dataset_name}': column '{prompt}' has texts in some rows and conversations in others"
        raise ValueError(mixed + ". Make them all conversations: [{'role': 'user', 'content': TEXT}].")
    has_gold = gold or data.solution_column or set(SOLUTION_COLUMNS) & set(dataset.column_names)
    named = places(data.prompt_template or "{prompt}")
    choices = [name.strip() for name in (data.choices_column or "").split(",") if name.strip()]
    if "choices" in named and not choices:
        choices = [_column(dataset, data, "choices_column", _CHOICES)]
    source = _Source(
        gold=gold,
        prompt=prompt,
        solution=_column(dataset, data, "solution_column", SOLUTION_COLUMNS) if has_gold else None,
        context=_column(dataset, data, "context_column", ()) if data.context_column else None,
        choices=choices,
        shown=sorted(named - {"prompt", "choices", prompt}),
    )
    if not named & {"prompt", prompt}:
        forms = f"`{{prompt}}` or `{{{prompt}}}`"
        if is_jinja(data.prompt_template or ""):
            forms = "`{{ prompt }}` (with {{ or {% it is a Jinja template)"
        raise ValueError(f"prompt_template must hold {forms}, the place of the problem.")
    if gold and source.solution in named:
        raise ValueError(f"prompt_template shows the gold, which is column '{source.solution}'. Take it out.")
    _require_columns("choices_column", source.choices, dataset, data)
    _require_columns("prompt_template", source.shown, dataset, data)
    return replace(source, reading=_how_golds_name_options(dataset, data, source))


def _how_golds_name_options(dataset: Dataset, data: DataArguments, source: _Source) -> str:
    """The reading of all rows, since one alone does not tell from where golds count."""
    if not source.choices or source.solution is None:
        return ""
    found = []
    lenient = replace(data, on_missing_gold="drop")
    for index, row in enumerate(_rows(dataset, [source.solution, *source.choices])):
        if (gold := _gold(row[source.solution], lenient, source.solution, index)) is not None:
            found.append((gold, source.options(row, f"{index} of '{data.dataset_name}'")))
    return how_read(found)[0]


def _read(
    dataset: Dataset,
    data: DataArguments,
    source: _Source,
    conversational: bool,
    held_out: bool,
    reads: Collection[str],
    counted: Sequence[str],
) -> tuple[list[tuple[int, dict[str, Any]]], str, int]:
    """The rows that stay, by their index in the dataset, with prompt, gold and id; from where these are read; and how
    many are left out since an earlier row has their id."""
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    seen: Counter[str] = Counter()
    for index, row in enumerate(_rows(dataset, [*source.columns, *counted])):
        cell = without_answer(row[source.prompt])
        if is_blank(cell):
            seen["blank"] += 1
            continue
        context = as_text(row[source.context]).strip() if source.context else ""
        before = f"{context}\n\n" if context else ""
        problem = before + _problem(cell, data, source.prompt, index)
        # The first 32 bits of the id, a hash, are as good as a random number that stays.
        drawn = int(prompt_id(problem)[:8], 16) / 16**8
        if (drawn < data.test_fraction) == held_out:
            options = source.options(row, f"{index} of '{data.dataset_name}'")
            gold = _golds(row, options, data, source, index)
            if source.gold and gold in (None, []):
                seen["missing"] += 1
                continue
            seen["cut"] += cell is not row[source.prompt]
            columns = {column: row[column] for column in counted}
            columns |= {"solution": gold} if "solution" in reads else {}
            columns |= {"choices": [text for _, text in options]} if options else {}
            shown = {column: row[column] for column in source.shown}
            prompt = prompt_of(cell, data, before, options, shown, conversational=conversational)
            name = prompt_id(problem if is_single_turn(cell) else cell, columns)
            # Another prompt around the same problem is not a repetition: the whole prompt tells the two apart.
            if name in found and found[name][1]["prompt"] != prompt:
                name = prompt_id(before + cell if isinstance(cell, str) else cell, {**shown, **columns})
            seen["again"] += name in found
            made = {"prompt": prompt, **({"solution": gold} if source.solution else {}), "prompt_id": name}
            found.setdefault(name, (index, made))
        if data.max_train_samples is not None and len(found) >= data.max_train_samples:
            break
    if seen["missing"]:
        said = "'%s': left out %d %s problem(s) without a gold."
        logging.getLogger(__name__).warning(
            said, data.dataset_name, seen["missing"], "held-out" if held_out else "training"
        )
    read = f"'{data.dataset_name}', {len(dataset)} rows: the problem from column '{source.prompt}', "
    read += f"the gold from '{source.solution}'" if source.solution else "no gold, which no reward function reads"
    read += f" ({source.reading} of the options in '{', '.join(source.choices)}')" if source.reading else ""
    read += f"; {seen['blank']} are left out, whose problem is empty" if seen["blank"] else ""
    read += f"; {seen['again']} are left out, whose problem an earlier row has" if seen["again"] else ""
    read += f"; {seen['cut']} conversations are taken up to the assistant's answer at their end" if seen["cut"] else ""
    read += "; its column 'prompt_id' is replaced by ids of the problems" if "prompt_id" in dataset.column_names else ""
    return list(found.values()), read, seen["again"]


def _unread_texts(dataset: Dataset, read: Collection[str]) -> list[str]:
    """The columns with texts of several words among the first cells, if they are not among those that are `read`."""
    first = dataset.select(range(min(100, len(dataset)))).to_dict()
    texts = {name: [cell for cell in cells if isinstance(cell, str)] for name, cells in first.items()}
    return [name for name, cells in texts.items() if name not in read and any(" " in cell.strip() for cell in cells)]


def _shared_prompts(prompts: Sequence[Any], golds: Sequence[Any], again: int) -> str:
    """A line if there are prompts with several golds, or if most rows, `again`, are left out since an earlier one has
    their prompt and gold; empty if not. The prompts may lack a column."""
    # Their hashes, since the texts of all prompts would be held twice.
    keys = [hash(str(prompt)) for prompt in prompts]
    firsts = dict(zip(reversed(keys), reversed(golds), strict=True))
    others = [index for index, key in enumerate(keys) if golds[index] != firsts[key]]
    if not others and again <= len(prompts):
        return ""
    said = f"\n{len(others)} rows have the prompt of an earlier row and another gold"
    for i in others[:1]:
        two = f"{str(firsts[keys[i]])[:100]!r} and {str(golds[i])[:100]!r}"
        said += f" ({problem_text(prompts[i])[:200]!r} has {two})"
    said += f", and {again} have its gold, too, and are left out. If a column that the prompt does not show belongs to "
    return said + "the problem, set context_column to its name, or write it as {column} into prompt_template"


def _presented(data: DataArguments, prompt: Any, conversational: bool) -> str:
    """In a sentence what is made of the prompts of the dataset."""
    said = f"prompt_template {data.prompt_template!r} is put around each problem"
    if data.prompt_template is None:
        text = isinstance(prompt, str)
        said = f"The prompts are {'texts' if text else 'conversations'} as the dataset has them"
        if text and conversational and "<|" not in prompt:
            said += (
                ", without the chat template that the model has: prompt_template: '{prompt}' makes each one a user's "
                "turn in it"
            )
    return said + (", and system_prompt is the system message" if data.system_prompt else "")


def _kept(dataset: Dataset, data: DataArguments) -> list[str]:
    """The columns that stay as they are: not those that TRL has another meaning for, unless they are asked for."""
    _require_columns("keep_columns", data.keep_columns or (), dataset, data)
    own = {"prompt", "solution", "prompt_id"}
    if data.keep_columns is not None:
        return [column for column in data.keep_columns if column not in own]
    return [column for column in dataset.column_names if column not in own | TAKEN | IMAGES]


def _rows(dataset: Dataset, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The cells of these columns, in batches: sets have millions of rows.

    They are decoded: in a column whose cells are of several kinds, Arrow has the JSON of each, with its quotes.
    """
    names = list(dict.fromkeys(columns))
    for batch in dataset.select_columns(names).with_format(None).iter(1000):
        for cells in zip(*(batch[name] for name in names), strict=True):
            yield dict(zip(names, cells, strict=True))


def _with_fields(dataset: Dataset) -> Dataset:
    """The dataset with a column for each field of its records, named with a dot, besides the records themselves.

    The numbers of classes are their names here, and -1, which stands for no class, is None.
    """
    flat = dataset.flatten()
    records = [column for column in dataset.column_names if column not in flat.column_names]
    named = concatenate_datasets([flat, dataset.select_columns(records)], axis=1) if records else flat
    for column, kind in flat.features.items():
        if isinstance(kind, ClassLabel):
            cells = [None if number in (None, -1) else kind.int2str(number) for number in flat[column]]
            named = named.remove_columns(column).add_column(column, cells)
    return named


def prompt_of(
    cell: Any,
    data: DataArguments,
    before: str = "",
    options: Sequence[Option] = (),
    shown: Mapping[str, Any] | None = None,
    *,
    conversational: bool,
) -> str | list[dict[str, Any]]:
    """The prompt of a row: its cell, with the template around the last turn of a user if `data` has one.

    `before` goes before the problem, and the lines of `options` behind it, unless the template has a place for them.
    `shown` are the cells of the other columns that it has places for. Template and system prompt make a conversation if
    `conversational`, else a text whose first paragraph is the system message; without them a text stays a text.

    Raises:
        ValueError: the template leaves nothing, or a conversation of several turns would have to become a text.
    """
    template = data.prompt_template
    system = data.system_prompt
    placed = template is not None and "choices" in places(template)
    after = f"\n\n{lettered(options)}" if options and not placed else ""
    # Jinja writes the options as it likes.
    choices = [text for _, text in options] if template and is_jinja(template) else lettered(options)
    if template is None and not system and (isinstance(cell, str) or not (before or after)):
        return before + cell + after if isinstance(cell, str) else cell
    messages = [{"role": "user", "content": cell}] if isinstance(cell, str) else list(cell)
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    if template is not None or before or after:
        text = bare_problem([messages[last]], strip_instructions=template is not None and data.strip_instructions)
        problem = before + (text or "") + after
        values = {**(shown or {}), "choices": choices, "prompt": problem, str(data.prompt_column): problem}
        asked = problem if template is None else filled(template, values)
        if is_blank(asked):
            raise ValueError(f"prompt_template: it leaves an empty prompt of the problem {problem[:100]!r}.")
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
    if files := data_files(name):
        return load_files(name, files)
    if any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
        return load_saved(name, data.dataset_train_split)
    try:
        return load_dataset(name, data.dataset_config, split=data.dataset_train_split)
    except ValueError:
        raise
    except Exception as error:
        said = f"could not be loaded ({type(error).__name__}: {str(error)[:200]})"
        forms = f"a Hub id, the path of a file ({', '.join(FORMATS)}), or {_GYM}NAME"
        raise ValueError(f"dataset_name: '{name}' {said}. It must be {forms}.") from error


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


def _require_columns(key: str, columns: Sequence[str], dataset: Dataset, data: DataArguments) -> None:
    """Raise ValueError if the key names a column that the dataset does not have."""
    known = dataset.column_names
    for name in columns:
        if name not in known:
            near = did_you_mean(name, known)
            raise ValueError(f"{key}: '{data.dataset_name}' has no column '{name}', only {known}.{near}")


def _column(dataset: Dataset, data: DataArguments, key: str, candidates: Sequence[str]) -> str:
    chosen: str | None = getattr(data, key)
    _require_columns(key, [chosen] if chosen else (), dataset, data)
    found = [chosen] if chosen else [name for name in candidates if name in dataset.column_names]
    if not found:
        has = f"'{data.dataset_name}' has none of the columns {candidates}, only {dataset.column_names}"
        without = ", or name a reward that reads no gold (reward_funcs)" if key == "solution_column" else ""
        raise ValueError(f"{has}; say which one with {key}{without}.")
    return found[0]


def _problem(value: Any, data: DataArguments, column: str, index: int) -> str:
    problem = bare_problem(value, strip_instructions=data.strip_instructions)
    if problem is None:
        cell = f"Row {index} of '{data.dataset_name}': column '{column}' holds {type(value).__name__}"
        needs = "neither a text nor a conversation with a user's turn. Set prompt_column"
        raise ValueError(f"{cell} {str(value)[:60]!r}, {needs}.")
    return problem


def _golds(
    row: Mapping[str, Any], options: Sequence[Option], data: DataArguments, source: _Source, index: int
) -> str | list[str] | None:
    """The cell of ``solution``: one text, or with ``solution_list: any`` a list, of one text or more."""
    if source.solution is None:
        return None
    cell = row[source.solution]
    several = data.solution_list == "any"
    cells = cell if several and isinstance(cell, list) and cell else [cell]
    golds = [_gold(each, data, source.solution, index) for each in cells]
    if options:
        golds = [gold and _letter(gold, options, data, source, index) for gold in golds]
    found = [gold for gold in golds if gold is not None]
    return found if several else next(iter(found), None)


def _letter(gold: str, options: Sequence[Option], data: DataArguments, source: _Source, index: int) -> str | None:
    """The letter of the option that is the gold; None where there is none and such rows are to be dropped."""
    letter = letter_of(gold, options, source.reading)
    if letter is None and data.on_missing_gold != "drop":
        raise ValueError(
            f"Row {index} of '{data.dataset_name}': the gold {gold[:60]!r} is none of its {len(options)} options "
            f"(read as {source.reading}). Remove such rows, set on_missing_gold: drop, or set solution_column."
        )
    return letter


def _gold(value: Any, data: DataArguments, column: str, index: int) -> str | None:
    """The gold as text; None where there is none and such rows are to be dropped."""
    row = f"{index} of '{data.dataset_name}'"
    pattern = data.solution_pattern
    # NaN is how Arrow and pandas write a number that is missing.
    text = gold_text(value) if pattern is None or value is None or value != value else str(value)
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
