"""Rollouts to grade, made from real golds with a seed: right in several forms, wrong, and malformed."""

from __future__ import annotations

import argparse
import json
import random
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from basis_rl.rewards.extract import plain_number
from benchmarks.common import parser_of

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

FEW = ["7", r"\frac{1}{2}", "x^2-1", r"\{1,2\}", "(1,2)", r"\text{east}", r"2\sqrt{3}", "1,000", "x=5", r"50\%"]
_SENTENCES = (
    "Let us first write down what is given and what we look for.",
    r"We have $a_{n+1} = 2a_n + 1$ for all $n \ge 1$, so the difference is \[ a_{n+1} - a_n = a_n + 1. \]",
    r"Substituting $x = \frac{3}{2}$ gives $2x - 1 = 2$, which is what we wanted.",
    "Wait, that cannot be right, since the left side is even and the right side is odd.",
    "Let me check the other case before going on, because the answer depends on the sign.",
    r"By the quadratic formula, \[ x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}, \] and only one root is positive.",
    "There are 12 ways to choose the first and 11 ways to choose the second, and order does not matter.",
    r"Therefore the area is $\frac{1}{2} \cdot 6 \cdot 8 = 24$ square units.",
    "So far so good; now add the two equations and simplify.",
    r"Hence $\sin^2\theta + \cos^2\theta = 1$ settles it.",
)


@dataclass(frozen=True)
class Case:
    """One rollout and the gold of its problem; `kind` is how it was made, `right` whether it is meant to be right."""

    gold: str
    completion: str
    kind: str
    right: bool


_NUMBERS = {
    "n": "number of answers",
    "pairs": "maximum number of pairs",
    "repeats": "number of repeats",
    "rounds": "number of rounds",
    "seed": "seed of the answers",
    "size": "number of rollouts",
    "timeout": "seconds that grading one answer may take",
    "workers": "number of grading processes",
}


def reward_parser(
    doc: str | None, data: str = "file with MATH-500 as JSON lines", **numbers: float
) -> argparse.ArgumentParser:
    """A parser with the options of the scripts in this folder: ``--data``, and an option for each of `numbers`."""
    parser = parser_of(doc)
    for name, value in {**numbers, "workers": 2, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{_NUMBERS[name]} ({value:g})")
    parser.add_argument("--data", type=Path, help=data)
    return parser


def golds_of(options: argparse.Namespace) -> list[str]:
    """The golds of MATH-500, or a few golds with ``--quick``."""
    if options.quick:
        return FEW
    path = options.data or DATA / "math500.jsonl"
    if not path.is_file():
        raise SystemExit(f"{path} is missing. Name the file with the rows of MATH-500 (column `answer`) with --data.")
    return [json.loads(line)["answer"] for line in path.read_text().splitlines()]


def cases(golds: list[str], size: int, seed: int) -> list[Case]:
    """`size` cases: on average two fifths are right, two fifths wrong and the rest malformed."""
    rng = random.Random(seed)
    return [_case(golds, golds[i % len(golds)], rng) for i in range(size)]


def _case(golds: list[str], gold: str, rng: random.Random) -> Case:
    kind = rng.choices(("right", "wrong", "malformed"), (2, 2, 1))[0]
    if kind == "right":
        name, answer = _right(gold, rng)
    elif kind == "wrong":
        name, answer = _wrong(golds, gold, rng)
    else:
        name, ending = _malformed(gold, rng)
        return Case(gold, prose(rng) + ending, name, False)
    text = prose(rng)
    if rng.random() < 0.2:  # another box before the final one, with the same or another answer
        text += rf" A first guess is \boxed{{{rng.choice([answer, rng.choice(golds)])}}}. " + prose(rng)
    return Case(gold, rf"{text} The answer is \boxed{{{answer}}}.", name, kind == "right")


def prose(rng: random.Random) -> str:
    """A few hundred words of reasoning."""
    return " ".join(rng.choice(_SENTENCES) for _ in range(rng.randint(8, 40)))


def _right(gold: str, rng: random.Random) -> tuple[str, str]:
    value = plain_number(gold)
    forms = {
        "as it is": gold,
        "spaced": re.sub(r"(?<![\\,\d])([,=+])(?!\d)", r" \1 ", gold),
        "dollars": f"${gold}$",
        "dfrac": gold.replace(r"\frac", r"\dfrac"),
    }
    if value is not None and value.denominator > 1:
        forms["decimal"] = f"{float(value):.8g}"
        forms["slash"] = f"{value.numerator}/{value.denominator}"
    elif value is not None:
        forms["decimal"] = f"{value}.0"
        forms["fraction"] = rf"\frac{{{2 * value}}}{{2}}"
    name = rng.choice(list(forms))
    return f"right: {name}", forms[name]


def _wrong(golds: list[str], gold: str, rng: random.Random) -> tuple[str, str]:
    value = plain_number(gold)
    forms = {"another gold": rng.choice([g for g in rng.sample(golds, 5) if g != gold] or ["?"]), "sign": f"-{gold}"}
    if value is not None:
        forms["off by one"] = _written(value + rng.choice((-1, 1)))
    else:
        forms["off by one"] = f"{gold}+1"
    name = rng.choice(list(forms))
    return f"wrong: {name}", forms[name]


def _written(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _malformed(gold: str, rng: random.Random) -> tuple[str, str]:
    endings = {
        "unclosed box": rf" The answer is \boxed{{{gold}",
        "empty box": r" The answer is \boxed{}.",
        "no box": f" The answer is {gold}.",
        "cut off": "",
    }
    name = rng.choice(list(endings))
    return f"malformed: {name}", endings[name]
