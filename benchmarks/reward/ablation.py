r"""Which rules of the grading change verdicts, and is a right answer of Math-Verify lost?

    python -m benchmarks.reward.ablation [--size 400] [--quick]

Golds of the data folder are written in natural renderings (right answers) and put into the templates of
`benchmarks.reward.hacking` (wrong ones); the cases of tests/rewards/math and the rollouts of `benchmarks.reward.styles`
are added. Every rule is then switched off in
turn, and the verdicts that change are counted: ``lost`` right answers that only score with it, and ``free`` wrong ones
that only it refuses; ``harm`` are the right answers that score without it. A rule is a regular expression of a module
of `basis_rl.rewards.math`, an entry of one of its tables of rewrites, or a reason to refuse.

Then Math-Verify alone is asked about every rendering that scores 0 here. ``math_verify`` lists what it takes for right;
each such kind is a row of docs/rewards.md.

Everything runs in this process, and verdicts are stored in the temporary folder until a module changes.

Results: ``benchmarks/results/reward_ablation.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import pickle
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from math_verify import parse, verify

from basis_rl.rewards import MathVerifyReward, gold_answer
from basis_rl.rewards.extract import last_boxed, plain_number
from basis_rl.rewards.math import grading, latex, notation, quick, reading, spelled
from basis_rl.rewards.math.places import find_answer
from basis_rl.rewards.math.quick import same_text
from basis_rl.rewards.math.screen import screened
from basis_rl.rewards.thought import after_thought
from benchmarks.common import save
from benchmarks.reward import styles
from benchmarks.reward.cases import DATA, FEW, reward_parser
from benchmarks.reward.hacking import accepted_by, all_golds, pairs

_TESTS = Path(__file__).parents[2] / "tests" / "rewards" / "math"
_MODULES = (notation, spelled, quick, reading, latex, grading)
_NEVER = re.compile(r"(?!)")
# Of the expressions of the grading processes those that are rules; the others say what a word or a number is.
_OF_LATEX = (
    "_INDEXED", "_NAMED", "_GAMMA", "SIGNS", "MODULUS", "_IMAGINARY", "_WORDS", "_MIXED",
)  # fmt: skip
Pair = tuple[str, str]


def renderings(gold: str) -> dict[str, str]:
    """Right answers to a gold as models write them, by how each is made; those that change nothing are left out."""
    made = {
        "dfrac": gold.replace(r"\frac", r"\dfrac").replace(r"\ddfrac", r"\dfrac"),
        "short fractions": re.sub(r"\\d?frac\{(\d)\}\{(\d)\}", r"\\frac\1\2", gold),
        "slashes": re.sub(r"(?<![\d}])\\d?frac\{(\w+)\}\{(\d+|[a-z])\}$", r"\1/\2", gold),
        "short roots": re.sub(r"\\sqrt\{(\d)\}", r"\\sqrt\1", gold),
        "unicode": re.sub(r"\\sqrt\{(\d+)\}", r"√\1", gold).replace(r"\pi", "π").replace(r"^\circ", "°"),
        "blanks": re.sub(r"(?<=[^\s\\,{(])([=+<>-])(?=[\w\\])", r" \1 ", gold),
        "no blanks": re.sub(r"(?<![a-zA-Z]) | (?![a-zA-Z])", "", gold),
        "brackets": re.sub(r"(?<!left)(?<!right)([()])", _sized, gold) if gold[:1] == "(" else gold,
        "dollars": f"${gold}$",
        "full stop": f"{gold}." if gold[-1] != "." else gold,
        "bold": rf"\mathbf{{{gold}}}",
        "no text": re.sub(r"^\\text\{\(?([\w ]+)\)?\}$", r"\1", gold),
        "text": re.sub(r"^[A-Za-z]{3,}$|^[A-H]$", r"\\text{\g<0>}", gold),
        "products": re.sub(r"(?<=\d)(?=\\sqrt|\\pi|[xyzn](?![a-z]))", r" \\cdot ", gold),
        "stars": _ascii(gold),
        "arrays": re.sub(r"\\begin\{[pb]matrix\}(.*)\\end\{[pb]matrix\}", _array, gold, flags=re.DOTALL),
        "row distances": re.sub(r"\\\\(?=\s*\S)", r"\\\\[2pt] ", gold) if "matrix" in gold else gold,
        "and": re.sub(r"^([^,()\[\]{}]+), ([^,()\[\]{}]+)$", r"\1 \\text{ and } \2", gold),
        "reversed": re.sub(r"^(-?[\d.]+), (-?[\d.]+)$", r"\2, \1", gold),
        "other side": re.sub(r"^([^=,]*[xy][^=,]*)=\s*0$", r"0 = \1", gold),
        "right side": re.sub(r"^[a-zA-Z]\s*=\s*([^=,]+)$", r"\1", gold),
        "unit": rf"{gold}\text{{ units}}" if re.fullmatch(r"\d+(?:\.\d+)?", gold) else gold,
        "words behind": f"{gold} apples" if re.fullmatch(r"\d+", gold) else gold,
        "named": f"x = {gold}" if plain_number(gold) is not None else gold,
    }
    return {name: text for name, text in {**made, **_values(gold)}.items() if text != gold}


def _values(gold: str) -> dict[str, str]:
    """A numeral in other notations."""
    value = plain_number(gold)
    if value is None or abs(value) > 10**9 or "." in gold:
        return {}
    whole = value.denominator == 1
    made = {"fraction": rf"\frac{{{2 * value}}}{{2}}", "decimal": f"{value}.0"} if whole else {}
    if whole and abs(value) >= 1000:
        written = f"{int(value):,}"
        signs = {"commas": ",", "thin spaces": r"\,", "spaces": " ", "braced commas": "{,}"}
        return made | {name: written.replace(",", sign) for name, sign in signs.items()}
    if not whole and abs(value) < 1 and 10**6 % value.denominator == 0:
        made["decimal"] = f"{float(value):g}"
    if value > 1 and not whole:
        made["mixed"] = rf"{int(value)}\frac{{{value.numerator % value.denominator}}}{{{value.denominator}}}"
    return made


def _sized(match: re.Match[str]) -> str:
    return (r"\left" if match[0] == "(" else r"\right") + match[0]


def _array(match: re.Match[str]) -> str:
    columns = "c" * (match[1].split(r"\\")[0].count("&") + 1)
    return rf"\left(\begin{{array}}{{{columns}}}{match[1]}\end{{array}}\right)"


def _ascii(gold: str) -> str:
    """As a calculator writes it, where nothing but fractions, roots and pi is in it."""
    text = re.sub(r"\\d?frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/(\2)", re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", gold))
    text = re.sub(r"(?<=\d)(?=sqrt|\\pi)", "*", text).replace(r"\pi", "pi").replace("^", "**")
    return gold if re.search(r"[\\{}]", text) else text


def chosen_pairs(golds: list[str], size: int, seed: int, tests: bool = True) -> dict[Pair, bool]:
    """Pairs, and whether a person would accept them: renderings, templates, and the cases of `tests`."""
    table: dict[Pair, bool] = {}
    for template, gold, text in pairs(golds, 12 * size, seed, every=tests):
        answer = last_boxed(text)
        if answer is not None and accepted_by(template, gold) is None:
            table[gold.text, answer] = False
    table |= {(gold, answer): True for gold in golds for answer in renderings(gold).values()}
    if not tests:
        return table
    kinds, tables = (json.loads((_TESTS / name).read_text()) for name in ("kinds.json", "answers.json"))
    for right in (True, False):
        word = "right" if right else "wrong"
        rows = [row for kind in kinds[word].values() for row in kind]
        rows += [row for name in (word, f"{word}_here") for row in tables[name]["rows"]]
        found = {(gold, answer): right for gold, *answers in rows for answer in answers}
        table |= {pair: right for pair, right in found.items() if r"\boxed" not in "".join(pair)}
    table |= {pair: right for pair, right in rollouts().items() if r"\boxed" not in "".join(pair)}
    return table


def rollouts() -> dict[Pair, bool]:
    """The answers in the rollouts of `benchmarks.reward.styles`, and whether a reader takes them as right."""
    found: dict[Pair, bool] = {}
    for path in styles.FILES:
        for row in map(json.loads, path.read_text().splitlines()):
            gold = styles.golds(DATA, row["set"])[row["row"]] if row["set"] else gold_answer(row["gold"])
            answer = find_answer(after_thought(row["completion"]), "anywhere")
            if answer:
                found[gold, answer] = row["right"]
    return found


class Grader:
    """Verdicts in this process, remembered."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.reward = MathVerifyReward(num_workers=1)
        texts = "".join(Path(module.__file__ or "").read_text() for module in _MODULES)
        self.file = Path(tempfile.gettempdir()) / f"ablation_{hashlib.sha256(texts.encode()).hexdigest()[:16]}.pickle"
        self.known: dict[Any, bool] = pickle.loads(self.file.read_bytes()) if self.file.is_file() else {}

    def forms(self, pair: Pair) -> tuple[str, str, bool | None]:
        """The normal forms, and the verdict if no Math-Verify is needed."""
        gold, answer = pair
        if same_text(gold, answer) or screened(gold, answer):
            return gold, answer, screened(gold, answer) is None
        form = notation.normal_form(gold)
        forms = form, reading.in_terms_of(form, notation.normal_form(answer))
        quickly = self.reward._without_worker(forms, False)
        return *forms, None if quickly is None else quickly == "right"

    def graded(self, forms: Pair, rule: str = "") -> bool:
        """Math-Verify's part of the verdict; `rule` names what is switched off in it."""
        key = (rule, *forms)
        if key not in self.known:
            latex.readings.cache_clear()
            with _alarm(self.seconds):
                self.known[key] = False
                self.known[key] = grading.grade(*forms) == "right"
        return self.known[key]

    def verdict(self, pair: Pair) -> bool:
        """Of a gold and an answer, by all rules."""
        gold, answer, quickly = self.forms(pair)
        return self.graded((gold, answer)) if quickly is None else quickly

    def store(self) -> None:
        """For the next run."""
        self.file.write_bytes(pickle.dumps(self.known))


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Leave the block after so many seconds; what it raises is passed over."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with contextlib.suppress(Exception):
        yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def rules() -> dict[str, Any]:
    """Every rule, and what switches it off, a context manager."""
    found: dict[str, Any] = {}
    for module in (notation, quick, reading, latex):
        name = module.__name__.rpartition(".")[2]
        for attribute, value in vars(module).items():
            if isinstance(value, re.Pattern) and (module is not latex or attribute in _OF_LATEX):
                found[f"{name}.{attribute}"] = patch.object(module, attribute, _never(value))
    rows = notation._REWRITES
    for i, (pattern, _) in enumerate(rows):
        found[f"rewrite {i}: {pattern.pattern}"] = patch.object(notation, "_REWRITES", (*rows[:i], *rows[i + 1 :]))
    phrases = spelled._PHRASES
    for i, (pattern, _) in enumerate(phrases):
        found[f"phrase {i}: {pattern.pattern}"] = patch.object(spelled, "_PHRASES", (*phrases[:i], *phrases[i + 1 :]))
    for reason in ("beside", "dots", "builder"):
        found[f"refused: {reason}"] = _without(reading, "refused_reading", reason)
    for reason in ("chain", "interval", "infinity", "modulus", "unit", "base", "approximation", "symbol", "near"):
        found[f"unsound: {reason}"] = _without(grading, "_unsound", reason)
    for name in ("hedged", "primes_differ"):
        found[name] = patch(f"basis_rl.rewards.math.reward.{name}", lambda gold, answer: False)
    return found


def _never(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """The same groups, no match."""
    return re.compile(f"(?!)(?:{pattern.pattern})", pattern.flags)


def _without(module: Any, function: str, reason: str) -> Any:
    """The function of a module, which returns a reason or None, without one of its reasons."""
    kept = getattr(module, function)

    def changed(*args: Any) -> Any:
        said = kept(*args)
        return None if said == reason else said

    target = "basis_rl.rewards.math.reward" if function == "refused_reading" else module.__name__
    return patch(f"{target}.{function}", changed)


def ablate(grader: Grader, table: dict[Pair, bool]) -> dict[str, dict[str, Any]]:
    """For each rule how many verdicts it changes, and the first three of each kind."""
    before = {pair: (grader.forms(pair), grader.verdict(pair)) for pair in table}
    grader.store()
    found: dict[str, dict[str, Any]] = {}
    for rule, off in rules().items():
        changes: dict[str, list[Pair]] = {"lost": [], "free": [], "harm": []}
        # What the grading itself does is only different where its expressions match, or where it refuses.
        inner = rule.startswith(("latex", "unsound"))
        pattern = getattr(latex, rule.partition(".")[2], _NEVER)
        with off:
            for pair, right in table.items():
                (gold, answer, quickly), verdict = before[pair]
                if inner and (quickly is not None or not _concerns(rule, pattern, (gold, answer), verdict)):
                    continue
                now = (gold, answer, quickly) if inner else grader.forms(pair)
                if not inner and now == before[pair][0]:
                    continue
                verdict_now = grader.graded(now[:2], rule if inner else "") if now[2] is None else now[2]
                if verdict_now != verdict:
                    changes["harm" if verdict_now and right else "free" if verdict_now else "lost"].append(pair)
        latex.readings.cache_clear()
        changes["lost"] = [pair for pair in changes["lost"] if table[pair]]
        found[rule] = {name: {"count": len(kept), "first": kept[:3]} for name, kept in changes.items()}
    grader.store()
    return found


def _concerns(rule: str, pattern: re.Pattern[str], forms: Pair, verdict: bool) -> bool:
    return not verdict if rule.startswith("unsound") else any(pattern.search(text) for text in forms)


def lost_to_us(grader: Grader, golds: list[str]) -> list[dict[str, str]]:
    """Renderings that Math-Verify alone takes for right, and that score 0 here."""
    lost = []
    for gold in golds:
        for name, answer in renderings(gold).items():
            if not grader.verdict((gold, answer)) and _math_verify(gold, answer, grader):
                lost.append({"rendering": name, "gold": gold, "answer": answer})
    grader.store()
    return lost


def _math_verify(gold: str, answer: str, grader: Grader) -> bool:
    key = ("Math-Verify", gold, answer)
    if key not in grader.known:
        with _alarm(grader.seconds):
            grader.known[key] = False
            sides = [parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)]
            grader.known[key] = bool(verify(*sides, timeout_seconds=None))
    return grader.known[key]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    parser = reward_parser(__doc__, "folder with the data files", size=400, timeout=2.0)
    options = parser.parse_args(argv)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    began = time.perf_counter()
    golds = FEW[:4] if options.quick else all_golds(options.data or DATA)
    size = len(golds) if options.quick else min(options.size, len(golds))
    sample = random.Random(options.seed).sample(golds, size)
    grader = Grader(options.timeout)
    table = chosen_pairs(sample, size, options.seed, tests=not options.quick)
    found = ablate(grader, table)
    right = Counter((right, grader.verdict(pair)) for pair, right in table.items())
    lost = lost_to_us(grader, sample if options.quick else golds[:: max(1, len(golds) // (5 * size))])
    results = {
        "golds": size, "pairs": len(table), "right": right[True, True], "right_lost": right[True, False],
        "free_points": [pair for pair, meant in table.items() if not meant and grader.verdict(pair)],
        "version": grader.reward.version, "seconds": round(time.perf_counter() - began, 1), "rules": found,
        "math_verify": lost,
    }  # fmt: skip
    for rule, counts in found.items():
        numbers = ", ".join(f"{name} {counts[name]['count']}" for name in ("lost", "free", "harm"))
        print(f"{numbers:30} {rule[:120]}")
    print(f"{len(table)} pairs, {right[True, False]} right ones lost; of Math-Verify {len(lost)} are lost")
    if not options.quick:
        save("reward_ablation", results)
    return results


if __name__ == "__main__":
    main()
