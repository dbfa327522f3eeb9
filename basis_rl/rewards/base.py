"""The contract of a reward, and `check_reward`: one matrix, run over every registered reward and over yours."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from basis_rl.names import Mistakes
from basis_rl.rewards.call import WrongScores, called, scores_of

Column = Sequence[Any]
Completions = Sequence[str | list[dict[str, str]]]
"""Of each row the text, or the messages of a conversation (`basis_rl.rewards.extract.completion_text`)."""
LogMetric = Callable[[str, float], None] | None
Truncated = Sequence[bool] | None
"""Of each row whether the length limit cut it off; None where nobody can say."""
Scores = list[float | None]

_log = logging.getLogger(__name__)

# What a reward function is given besides the columns of the dataset; `truncated` is ours, the others are TRL's.
GIVEN = (
    "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "truncated", "environments",
)  # fmt: skip


class Reward(Protocol):
    r"""A reward function in TRL's form, as a plain function or an object.

    It is called with keywords: ``prompts``, ``completions``, ``completion_ids``, ``trainer_state``, ``log_extra``,
    ``log_metric`` (maybe ``environments``), and every column of the dataset, a list with an entry for each row; so it
    has ``**kwargs``. `BasisTrainer`, ``basis-rl eval`` and value tables also hand over ``truncated``: which rollouts
    the length limit cut off. A column that it cannot do without is a parameter without a default (`required_columns`):
    the trainer refuses a dataset that lacks it, before a model is loaded.

    The result is a list of finite numbers, None for a rollout that cannot be scored (its advantage is 0). A row's score
    depends on nothing but the row: not on the other rows, their order, or earlier calls.

    Optional, and what the trainer does without:

    - ``version``, a text that changes with what counts as right: without it a value table and a run, or a run and its
      resume, have the same reward if name and source are the same (`basis_rl.rewards.source`);
    - ``reads``, the names of columns that it takes from ``**kwargs`` (`read_columns`): without it rows with one prompt
      that differ in these alone are one problem;
    - ``reward_range``, the least and the largest score: without it beliefs learn it from the batches before;
    - ``check_golds`` (`GoldChecker`): without it no gold is checked before the run;
    - ``check_prompts``: is called with the texts of problems, raises ValueError for some that it cannot judge;
    - ``tell_prompt``: is called with the first prompt as the model is given it, with what the chat template adds;
    - ``tell_template``: is called with the chat template's text, empty without one, and whether one of the first 256
      prompts has a ``\boxed`` in it;
    - ``start``: is called before the model is loaded; starts processes without waiting for them;
    - ``thread_safe``: True where several threads may call it at once, as with ``rollouts: stream`` (a judge);
    - ``close``: without it nothing is ended. The trainer never calls it; the code that built the reward may.
    """

    __name__: str
    version: str

    def __call__(self, *args: Any, **kwargs: Any) -> Scores: ...

    def close(self) -> None:
        """End the processes, if there are any; they also end with the object, and with the program."""
        if (calls := getattr(self, "_calls", None)) is not None:
            calls.close()


@runtime_checkable
class GoldChecker(Protocol):
    """A reward that knows golds to which no answer could be right.

    Optional:

    - ``gold_columns``, the columns whose cells `check_golds` is given, where it is not ``solution`` alone;
    - ``gold_help``, a sentence on what to set if it cannot read the golds.
    """

    def check_golds(self, solution: Column) -> list[int]:
        """Indices of these among the cells of the column ``solution``, which may also be numbers or None."""


class RewardError(AssertionError):
    """A reward breaks its contract; the message has a line for each broken promise."""


def required_columns(reward: Any) -> set[str]:
    """The columns of the dataset that a reward function cannot do without, by its signature; of a model none."""
    return _named(reward, with_defaults=False)


def check_reward_columns(dataset: Any, reward_funcs: Sequence[Any], what: str) -> None:
    """Raise ValueError if a Dataset, called `what`, lacks a column that a reward function requires."""
    wrong = Mistakes()
    for func in reward_funcs:
        missing = sorted(required_columns(func) - set(dataset.column_names))
        if missing:
            name = getattr(func, "__name__", type(func).__name__)
            message = (
                f"The reward function '{name}' reads the columns {missing}; the {what} has {dataset.column_names}. "
                "Rename or add columns, or take another reward function."
            )
            wrong.found.append(ValueError(message))
    wrong.tell()


def _named(reward: Any, *, with_defaults: bool) -> set[str]:
    if isinstance(reward, str) or not callable(reward) or hasattr(reward, "forward"):
        return set()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [p for p in inspect.signature(reward).parameters.values() if p.kind in kinds]
    return {p.name for p in parameters if with_defaults or p.default is p.empty} - set(GIVEN)


def read_columns(reward_funcs: Sequence[Any]) -> frozenset[str]:
    """What may be columns that some of these functions read: the names in their signatures, and in their ``reads``.

    Raises:
        ValueError: ``reads`` is no collection of names.
    """
    found: set[str] = set()
    for reward in reward_funcs:
        found |= _named(reward, with_defaults=True)
        declared = getattr(reward, "reads", ())
        if isinstance(declared, str) or not isinstance(declared, Collection):
            name = getattr(reward, "__name__", type(reward).__name__)
            raise ValueError(f"The `reads` of '{name}' must be a list of columns, got {declared!r}.")
        found |= set(declared)
    return frozenset(found)


def checked_range(what: str, given: Sequence[float]) -> tuple[float, float]:
    """`given` as ``(low, high)``.

    Raises:
        ValueError: it is not two finite numbers, the smaller one first.
    """
    try:
        low, high = (float(end) for end in given)
    except (TypeError, ValueError):
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"{what} must be the least and the largest reward, such as (0, 1), got {given!r}.")
    return low, high


def declared_range(rewards: Sequence[Any], weights: Sequence[float] | None = None) -> tuple[float, float] | None:
    """The range of the weighted sum of some reward functions, by their `reward_range`; None if one does not declare it.

    A function that scores nothing (None) adds nothing, so that the sum of those with negative ends is the least reward.

    Raises:
        ValueError: a function declares something else than a range.
    """
    declared: list[Any] = [getattr(reward, "reward_range", None) for reward in rewards]
    if not declared or None in declared:
        return None
    ends: list[tuple[float, float]] = []
    for reward, given, weight in zip(rewards, declared, weights or [1.0] * len(rewards), strict=True):
        name = getattr(reward, "__name__", type(reward).__name__)
        first, second = (weight * end for end in checked_range(f"The `reward_range` of '{name}'", given))
        ends.append((min(first, second), max(first, second)))
    low = sum(end for end, _ in ends if end < 0) or min(end for end, _ in ends)
    high = sum(end for _, end in ends if end > 0) or max(end for _, end in ends)
    return (low, high) if low < high else None


def log_shares(log_metric: LogMetric, name: str, counts: Mapping[str, int], of: int) -> None:
    """Log ``reward/NAME/KEY``, or ``reward/KEY`` without a name, as shares of `of` rollouts."""
    if log_metric is not None and of:
        for key, count in counts.items():
            log_metric("/".join(part for part in ("reward", name, key) if part), count / of)


def warn_late(what: str, late: int, of: int, seconds: float | None) -> None:
    """Log that `late` of the rollouts were not scored within the ``batch_timeout``, if there are any."""
    if late:
        message = "%s of %d of %d rollouts were not done in batch_timeout (%g s): they are not scored."
        _log.warning(message, what, late, of, seconds)


_TEXTS = (r"So it is \boxed{1}.", "<think>hm</think> <answer>2</answer>", "The answer is B.", "3", "```\nprint(4)\n```",
          r"\boxed{5} or \boxed{\frac{1}{2}}")  # fmt: skip
_CELLS = ("1", "2", "B", "3", '{"inputs": [""], "outputs": ["4"]}', "0.5")
_STRANGE = ("", " \n", "\x00", "\ud800", "e\u0301\u200b\u202e\u0663\u00b2", "\U0001f642" * 9, r"\boxed{" * 40, "}" * 40)
_PROMISES = ("name", "version", "golds", "signature", "result", "same_twice", "arguments", "order", "other_rows",
             "conversations", "strange", "columns", "close")  # fmt: skip


def check_reward(make: Any, columns: Mapping[str, Sequence[Any]] | None = None) -> list[str]:
    """Call a reward with rows that a trainer will give it sooner or later, and see which promises of `Reward` it keeps.

    Args:
        make: a class, or a function without required parameters, that builds the reward; the reward itself; or a plain
            function in TRL's form.
        columns: rows that fit it, ``completions`` among them (texts); columns that it requires and that are not here
            hold short answers.

    Returns:
        The names of the promises, all of which it keeps.

    Raises:
        RewardError: it breaks some of them; all are named.
        ValueError: `columns` of different lengths.
    """
    rows = {"completions": list(_TEXTS), **{name: list(cells) for name, cells in (columns or {}).items()}}
    if len({len(cells) for cells in rows.values()}) > 1:
        raise ValueError(f"check_reward needs columns of one length, got { ({k: len(v) for k, v in rows.items()}) }.")
    name = _safely(lambda: str(getattr(make, "__name__", type(make).__name__)))[0] or "The reward"
    reward, broken = _safely(lambda: _built(make))
    if broken is None and not callable(reward):
        broken = f"is a {type(reward).__name__}, which cannot be called"
    if broken is not None:
        raise RewardError(f"{name} {broken}.")
    checks = _Checks(reward, rows)
    found: dict[str, str] = {}
    for promise in _PROMISES:
        # Without these nothing can be said of what follows.
        if promise == "close" or not any(found.get(needed) for needed in ("signature", "result", "same_twice")):
            message, raised = _safely(getattr(checks, promise))
            found[promise] = raised or message
    lines = [f"- {promise}: it {message}" for promise, message in found.items() if message]
    if lines:
        raise RewardError(f"{name} breaks {len(lines)} of the promises of a reward:\n" + "\n".join(lines))
    return list(found)


def _built(make: Any) -> Any:
    builds = inspect.isclass(make)
    if inspect.isroutine(make):
        # A reward function takes what TRL hands over; a function that builds one needs nothing.
        parameters = inspect.signature(make).parameters.values()
        builds = not any(p.default is p.empty or p.name in GIVEN for p in parameters)
    return make() if builds else make


def _safely(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `work` returns, or in one line what it raises: the code is anybody's, and may raise anything."""
    try:
        return work(), None
    except WrongScores as wrong:
        return None, str(wrong)
    except (Exception, SystemExit) as error:
        said = " ".join("".join(traceback.format_exception_only(error)).split())
        return None, f"raises {said[:200]}"


def _same(a: Sequence[float], b: Sequence[float]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(math.isclose(x, y, rel_tol=1e-6) or (math.isnan(x) and math.isnan(y)) for x, y in pairs)


class _Checks:
    """One method for each promise, which returns how it is broken, an empty text if it is not."""

    def __init__(self, reward: Any, rows: dict[str, list[Any]]) -> None:
        self.reward = reward
        self.rows = rows
        self.size = len(rows["completions"])
        self.scores: list[float] = []

    def name(self) -> str:
        name = getattr(self.reward, "__name__", None)
        return "" if name and isinstance(name, str) else f"needs a `__name__`, a text that is not empty, not {name!r}"

    def version(self) -> str:
        version = getattr(self.reward, "version", "1")
        return "" if version and isinstance(version, str) else f"has a `version` that is not a text, but {version!r}"

    def signature(self) -> str:
        parameters = inspect.signature(self.reward).parameters.values()
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            return "has positional-only parameters, but is called with keywords"
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return f"has no **kwargs, but is given {', '.join(GIVEN[:-1])} and every column of the dataset"
        self.rows |= {
            name: [_CELLS[i % len(_CELLS)] for i in range(self.size)]
            for name in required_columns(self.reward) - self.rows.keys()
        }
        return ""

    def golds(self) -> str:
        if not hasattr(self.reward, "check_golds"):
            return ""
        column = getattr(self.reward, "gold_columns", ("solution",))[0]
        cells = [*self.rows.get(column, _CELLS), "", None]
        found = self.reward.check_golds(cells)
        if not isinstance(found, list) or any(type(i) is not int or not 0 <= i < len(cells) for i in found):
            return f"returns from check_golds no list of indices of the {len(cells)} golds, but {str(found)[:100]}"
        if len(set(found)) < len(found) or self.reward.check_golds(cells) != found:
            return "returns an index twice from check_golds, or other ones when it is asked again"
        return ""

    def result(self) -> str:
        self.scores = self._score()
        span = getattr(self.reward, "reward_range", None)
        low, high = (-math.inf, math.inf) if span is None else checked_range("`reward_range`", span)
        outside = [score for score in self.scores if score < low or score > high]
        return f"returns {outside[0]}, outside its `reward_range` {span}" if outside else ""

    def same_twice(self) -> str:
        return "" if _same(self._score(), self.scores) else "scores the same rows otherwise the second time"

    def arguments(self) -> str:
        given = self._given(self.rows, talk=True)
        kept = copy.deepcopy(given)
        called(self.reward, given)
        changed = [name for name in kept if given[name] != kept[name]]
        return f"writes into its arguments: {', '.join(changed)}" if changed else ""

    def order(self) -> str:
        order = [*range(1, self.size, 2), *range(0, self.size, 2)]
        same = _same(self._score(order), [self.scores[i] for i in order])
        return "" if same else "scores rows by their position: in another order they have other scores"

    def other_rows(self) -> str:
        alone = [self._score([i]) for i in range(self.size)]
        if all(_same(scores, [score]) for scores, score in zip(alone, self.scores, strict=True)):
            return ""
        return "scores a row otherwise when other rows are there"

    def conversations(self) -> str:
        same = _same(self._score(talk=True), self.scores)
        return "" if same else "scores a conversation's last message otherwise than the same text"

    def strange(self) -> str:
        for text in _STRANGE:
            rows = {**{name: cells[:1] for name, cells in self.rows.items()}, "completions": [text]}
            for talk in (False, True):
                _, raised = _safely(lambda: self._scored(rows, talk))  # noqa: B023
                if raised:
                    return f"{raised} (for the rollout {text[:20]!r})"
        return ""

    def columns(self) -> str:
        named = {*required_columns(self.reward), *getattr(self.reward, "reads", ()), "completions"}
        rows = {name: cells for name, cells in self.rows.items() if name in named}
        _, raised = _safely(lambda: self._scored(rows))
        return f"{raised}, when it has the columns of its signature only: {sorted(named)}" if raised else ""

    def close(self) -> str:
        for _ in range(2):
            getattr(self.reward, "close", lambda: None)()
        return ""

    def _score(self, order: Sequence[int] | None = None, talk: bool = False) -> list[float]:
        order = range(self.size) if order is None else order
        return self._scored({name: [cells[i] for i in order] for name, cells in self.rows.items()}, talk)

    def _scored(self, rows: Mapping[str, list[Any]], talk: bool = False) -> list[float]:
        """The scores as a trainer reads them: NaN where there is none, which a list says by None."""
        returned = called(self.reward, self._given(rows, talk))
        scores, _ = scores_of(returned, len(rows["completions"]))
        if any(isinstance(each, float) and math.isnan(each) for each in returned):
            raise WrongScores("returned nan, which is neither a finite number nor None")
        return scores

    def _given(self, rows: Mapping[str, list[Any]], talk: bool = False) -> dict[str, Any]:
        """What TRL hands over, of these rows; as conversations if `talk`."""
        rows = copy.deepcopy(dict(rows))
        texts = rows["completions"]
        given = {"prompts": [f"Question {text[:9]}" for text in texts], **rows}
        given["completion_ids"] = [list(range(len(text))) for text in texts]
        if talk:
            for name, role in (("prompts", "user"), ("completions", "assistant")):
                given[name] = [[{"role": role, "content": text}] for text in given[name]]
        return given
