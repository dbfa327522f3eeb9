"""From graded rollouts to what is reported of a benchmark, and to what is said of two models."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from basis_rl.evaluation.rollouts import GradedRollout
from basis_rl.functional.passk import Paired, bootstrap_interval, compare_paired, majority_at_k, pass_at_k
from basis_rl.rewards.extract import plain_number
from basis_rl.text import markdown_table

Rollouts = Mapping[str, Sequence[GradedRollout]]
_LEVEL = 0.95
# What does not change an answer, and the commands around words.
_DROPPED = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])|\$|(?<!\d)\s+|\s+(?!\d)|\.$")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}")
_MOST_FORMS = 16


def score(rollouts: Rollouts, equivalent: Callable[[list[tuple[str, str]]], list[bool]]) -> dict[str, Any]:
    """Everything that is reported of the rollouts of one benchmark, n per problem.

    ``avg@n`` is the mean reward; ``pass@k`` and ``maj@k`` are there for k = 1 (pass only), 2, 4, ... up to n. Each is
    ``{"value", "low", "high"}`` with a 95 % bootstrap interval over problems, as is ``plain``, the mean reward by
    Math-Verify alone. ``truncated``, ``no_answer`` and ``unscored`` are shares of the rollouts; ``levels`` has
    ``avg@n`` of each level of difficulty.

    Args:
        rollouts: by problem, the same number of each.
        equivalent: see `count_votes`.
    """
    n, right = counts(rollouts)
    each = int(n[0])
    assert bool((n == each).all()), "problems have different numbers of rollouts"
    rows = [row for group in rollouts.values() for row in group]
    average = f"avg@{each}"
    result: dict[str, Any] = {
        "num_problems": len(rollouts),
        "num_rollouts": each,
        average: _with_interval(right / n),
        "pass@k": {str(k): _with_interval(pass_at_k(each, right, k)) for k in _powers(each)},
        "truncated": fmean(row.truncated for row in rows),
        "no_answer": fmean(row.answer is None for row in rows),
        "unscored": fmean(row.reward is None for row in rows),
        "mean_tokens": fmean(row.tokens for row in rows),
    }
    if any(row.plain is not None for row in rows):
        alone = [[row.plain == 1.0 for row in group] for group in rollouts.values()]
        result["plain"] = _with_interval(torch.tensor(alone).double().mean(dim=1))
    if each > 1:
        votes = count_votes([[row.answer for row in group] for group in rollouts.values()], equivalent)
        correct = torch.tensor([[row.reward == 1.0 for row in group] for group in rollouts.values()])
        ks = [k for k in _powers(each) if k > 1]
        result["maj@k"] = {str(k): _with_interval(majority_at_k(votes, correct, k)) for k in ks}
    levels = [group[0].level for group in rollouts.values()]
    if any(level is not None for level in levels):
        result["levels"] = {
            str(level): {
                "num_problems": sum(other == level for other in levels),
                average: _with_interval((right / n)[[i for i, other in enumerate(levels) if other == level]]),
            }
            for level in sorted(set(levels), key=str)
        }
    return result


def compare(before: Rollouts, after: Rollouts) -> Paired:
    """Compare two models on the problems of one benchmark (`compare_paired`), the same for both: after - before."""
    assert set(before) == set(after), "the problems are not the same"
    n_a, a = counts(before)
    n_b, b = counts({i: after[i] for i in before})
    return compare_paired(a, b, (int(n_a[0]), int(n_b[0])), level=_LEVEL)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The results of several benchmarks as Markdown: percent, with the interval and what they were drawn with."""
    rows = []
    lines = []
    for name, result in results.items():
        n = result["num_rollouts"]
        drawn = result["settings"]
        average = result[f"avg@{n}"]
        sampling = "greedy" if drawn["temperature"] == 0 else f"T {drawn['temperature']:g}, top-p {drawn['top_p']:g}"
        rows.append(
            {
                "benchmark": name,
                "problems": result["num_problems"],
                "score": f"avg@{n} {_percent(average['value'])}",
                "95 % interval": f"{_percent(average['low'])} to {_percent(average['high'])}",
                "pass@k": _largest(result["pass@k"]) if n > 1 else "-",
                "maj@k": _largest(result.get("maj@k", {})),
                "truncated": _percent(result["truncated"]),
                "no answer": _percent(result["no_answer"]),
                "tokens": f"{result['mean_tokens']:.0f}",
                "sampling": f"{sampling}, at most {drawn['max_new_tokens']} tokens",
                "Math-Verify alone": _percent(result["plain"]["value"]) if "plain" in result else "-",
            }
        )
        levels = result.get("levels", {}).items()
        parts = [f"{level}: {_percent(r[f'avg@{n}']['value'])} of {r['num_problems']}" for level, r in levels]
        lines += ["", f"{name} by level: {', '.join(parts)}."] if parts else []
    return "\n".join([markdown_table([list(row.values()) for row in rows], list(rows[0])), *lines])


def counts(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Rollouts and right rollouts of each problem. Twice ``(P,)`` int64."""
    n = [len(rows) for rows in rollouts.values()]
    right = [sum(row.reward == 1.0 for row in rows) for rows in rollouts.values()]
    return torch.tensor(n, dtype=torch.int64), torch.tensor(right, dtype=torch.int64)


def mean_reward(rollouts: Rollouts) -> float:
    """``avg@n`` of the rollouts of one benchmark."""
    n, right = counts(rollouts)
    return float((right / n).mean())


def comparison_table(
    compared: Mapping[str, Paired], means: Mapping[str, tuple[float, float]], before: str, after: str
) -> str:
    """Paired comparisons as Markdown, in percentage points, and what was measured `before` and `after`, in percent."""
    rows = [
        [
            name,
            paired.num_problems,
            f"{100 * paired.difference:+.1f}",
            f"{100 * paired.low:+.1f} to {100 * paired.high:+.1f}",
            f"{paired.p_value:.2g}",
            *map(_percent, means[name]),
        ]
        for name, paired in compared.items()
    ]
    return markdown_table(rows, [f"{after} - {before}", "problems", "difference", "95 % interval", "p", before, after])


def _powers(n: int) -> list[int]:
    powers = [1 << i for i in range(n.bit_length())]
    return powers if powers[-1] == n else [*powers, n]


def _with_interval(values: Tensor) -> dict[str, float]:
    low, high = bootstrap_interval(values, level=_LEVEL)
    return {"value": float(values.double().mean()), "low": low, "high": high}


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _largest(results: Mapping[str, Mapping[str, float]]) -> str:
    if not results:
        return "-"
    k = max(results, key=int)
    return f"@{k} {_percent(results[k]['value'])}"


def vote_form(answer: str) -> str:
    r"""An answer without what does not change it: white space, ``\left``, ``$``, ``\text{}``; numerals by value."""
    value = plain_number(answer)
    if value is not None:
        return str(value)
    text = _WORDS.sub(r"\1", re.sub(r"\\[dt]frac", r"\\frac", answer))
    return _DROPPED.sub("", text)


def count_votes(
    answers: Sequence[Sequence[str | None]], equivalent: Callable[[list[tuple[str, str]]], list[bool]]
) -> Tensor:
    """Numbers of the answers, equal ones of a problem by the same number, -1 for none. ``(P, n)`` int64.

    Two answers are the same if their `vote_form` is, or if `equivalent` says so of the two forms; right answers and
    wrong ones are grouped by this one rule. Of a problem's forms the 16 most frequent are compared with each other (two
    numerals of different form differ), the others stand alone.

    Args:
        answers: ``P`` problems with n answers each, None where there is none.
        equivalent: whether the two of each pair are the same answer.
    """
    forms = [[None if a is None or not a.strip() else vote_form(a) for a in row] for row in answers]
    written = {f: a for row, raw in zip(forms, answers, strict=True) for f, a in zip(row, raw, strict=True) if f and a}
    frequent = [[form for form, _ in Counter(filter(None, row)).most_common(_MOST_FORMS)] for row in forms]
    pairs = [
        (p, a, b)
        for p, row in enumerate(frequent)
        for a, b in combinations(row, 2)
        if not _both_numerals(written[a], written[b])
    ]
    # Each pair once, whatever number of problems has it: a comparison may take a while.
    asked = sorted({(a, b) for _, a, b in pairs})
    verdicts = equivalent([(written[a], written[b]) for a, b in asked]) if asked else []
    same = dict(zip(asked, verdicts, strict=True))
    stands_for: list[dict[str, str]] = [{} for _ in forms]
    # `a` is at least as frequent as `b`, and comes first.
    for p, a, b in pairs:
        if same[a, b]:
            stands_for[p].setdefault(b, stands_for[p].get(a, a))
    numbers = torch.full((len(forms), len(forms[0]) if forms else 0), -1, dtype=torch.int64)
    for p, row in enumerate(forms):
        known: dict[str, int] = {}
        for i, form in enumerate(row):
            if form is not None:
                numbers[p, i] = known.setdefault(stands_for[p].get(form, form), len(known))
    return numbers


def _both_numerals(a: str, b: str) -> bool:
    return plain_number(a) is not None and plain_number(b) is not None
