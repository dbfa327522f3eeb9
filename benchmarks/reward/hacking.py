r"""Are there free points, answers that a person would reject but the reward accepts?

    python -m benchmarks.reward.hacking [--pairs 220000] [--progress FILE] [--quick]

Every gold of the data folder is put into templates: hedges, denials, products, numerals side by side, intervals, sets,
several boxes, chains of equations, approximations, empty and universal answers. A template states for which golds a
person would accept its answer. Everything else that the reward accepts is listed under ``free_points``, which should be
empty.
Answers that are accepted because of a documented choice (docs/rewards.md) are counted under the name of its row.

A run that was stopped resumes from the file of ``--progress``, unless the reward or the pairs have changed.

Results: ``benchmarks/results/reward_hacking.json``.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from tqdm import tqdm

from basis_rl.rewards import MathVerifyReward, last_boxed
from basis_rl.rewards.choice import boxed_letter
from basis_rl.rewards.extract import plain_number
from basis_rl.rewards.math.notation import normal_form
from basis_rl.rewards.math.reading import _OPTION
from benchmarks.common import save
from benchmarks.reward.cases import DATA, FEW, reward_parser

_CHUNK = 2_000
# Golds of the quick search: those that a product, a word, an interval or a ratio may be taken for as well.
FEW_AND_HARD = [
    *FEW, "0", r"\begin{pmatrix}0&0\\0&0\end{pmatrix}", r"\text{(C)}", r"(-\infty,\infty)", "8:34",
]  # fmt: skip
_FILES = {
    "gsm8k_train.jsonl": "answer", "gsm8k_test.jsonl": "answer", "math_train.json": "answer", "math500.jsonl": "answer",
    "aime24.jsonl": "answer", "aime25.jsonl": "answer", "amc23.jsonl": "answer", "minerva_math.jsonl": "solution",
    "olympiadbench.jsonl": "final_answer",
}  # fmt: skip
Truth = Callable[["Gold"], bool]


@dataclass(frozen=True)
class Gold:
    """A gold, its value if it is a numeral, and another number that does not occur in it."""

    text: str
    value: Fraction | None
    other: int


@dataclass(frozen=True)
class Template:
    """An answer for every gold, or a whole rollout if it contains a box.

    Attributes:
        text: ``V`` is the gold, ``N`` another number, ``A`` and ``B`` are two numbers whose sum is the gold.
        right: whether a person would accept the answer for a gold.
        row: the row of docs/rewards.md that accepts the answer although a person might not.
        numerals_only: whether the template is only for golds that are numerals.
    """

    text: str
    right: Truth = lambda gold: False
    row: str | None = None
    numerals_only: bool = False

    def fill(self, gold: Gold) -> str | None:
        """The rollout; None if the template is not for this gold."""
        text = self.text
        if self.numerals_only and (gold.value is None or gold.value.denominator > 1 or not 5 <= gold.value < 10**9):
            return None
        if self.numerals_only:
            first = 1 + gold.other % (int(gold.value or 0) - 2)
            text = text.replace("A", str(first)).replace("B", str(int(gold.value or 0) - first))
        text = text.replace("V", "\0").replace("N", str(gold.other)).replace("\0", gold.text)
        return text if r"\boxed" in self.text else rf"So the answer is \boxed{{{text}}}."


def is_one_of(*texts: str) -> Truth:
    """The gold is one of these texts, or of their values."""
    values = {value for value in map(plain_number, texts) if value is not None}
    return lambda gold: (
        _bare(gold.text) in map(_bare, texts)
        or (_is_choice(gold) and _bare(gold.text).upper() in (_bare(text).upper() for text in texts))
        or {gold.value, *map(plain_number, (_unitless(gold), _valued(gold)))} & values != set()
    )


def _is_choice(gold: Gold) -> bool:
    """Row `case`."""
    return r"\text" in gold.text or gold.text.upper() in "ABCDEFGH"


def _unitless(gold: Gold) -> str:
    return re.sub(r"\\(?:text|mbox|textnormal)\s*\{[^{}]*\}(?:\^\d)?$", "", normal_form(gold.text)).removeprefix(r"\$")


def _valued(gold: Gold) -> str:
    """What stands behind the last equals sign, without the base of a numeral: rows `assignment` and `base`."""
    return re.sub(r"_\{?\d+\}?$", "", gold.text.strip("$ ").rpartition("=")[2]).strip()


def _bare(text: str) -> str:
    """Without \\text{}, brackets and blanks."""
    return re.sub(r"\\text|[(){}\s]", "", normal_form(text)) or text


def _zero_matrix(gold: Gold) -> bool:
    return "matrix" in gold.text and not re.search(r"[1-9]", gold.text)


def _zero(gold: Gold) -> bool:
    parts = gold.text.replace(" ", "").strip("$()[]{}\\").split(",")
    return gold.value == 0 or _zero_matrix(gold) or "0" in (parts[0], parts[-1]) or parts[-1].endswith("=0")


def _ends_with_one(gold: Gold) -> bool:
    return re.search(r"(?<![\d.])0*[01](?:\.0*)?\W*$", gold.text) is not None or _valued(gold) in ("0", "1")


def _is_its_power(gold: Gold) -> bool:
    return _ends_with_one(gold) or (gold.text.endswith("i") and gold.other % 4 == 1)


def _has_number(gold: Gold) -> bool:
    """So that what follows is a unit."""
    return re.search(r"\d|\\pi|\\infty", gold.text) is not None


def _has_no_x(gold: Gold) -> bool:
    """So that a formula in x is an unknown that is set to it: rows `equation` and `assignment`."""
    return "x" not in re.sub(r"\\[a-z]+|\{\w?matrix\}|x\}?_\{?\w", "", gold.text.lower())


def _has_no_dollar(gold: Gold) -> bool:
    return r"\$" not in gold.text


def _has_point(gold: Gold) -> bool:
    return "." in gold.text


def _has_a(gold: Gold) -> bool:
    return "a" in gold.text.lower()


HEDGES = (
    r"V \text{ or } N", "V or N", "N or V", "V, N", "N, V", "V; N", "either V or N", r"\text{either } V \text{ or } N",
    r"\text{I give up, } V", "I give up V", r"V \text{ is wrong}", r"V \text{ (or } N\text{)}", r"\text{not } V",
    "not V", r"\neq V", r"\text{maybe } V", r"V \text{ or not}", r"N \text{ maybe } V", "N? V", "V? N?", "N) V", "N. V",
    r"V \text{ if } N \text{ else } N", r"\text{Answer } N \text{: } V", "V, ?", r"V, \ldots", r"N, \ldots, V",
)  # fmt: skip
DENIALS = (
    r"not \approx V", r"not\approx V", r"\not\approx V", r"\text{not} \approx V", "not x = V", "not = V", "isn't = V",
    "x isn't = V", r"\text{not } = V", r"\text{is not} = V", r"\text{wrong} = V", r"\text{maybe} = V", "never x = V",
    r"\text{anything but} = V", "if x = V", r"\neg x = V", r"\nexists x = V", r"\cancel{x} = V", "x != V", r"x \not= V",
    r"\text{N or} = V", r"\text{N or } \approx V", r"\text{neither} = V", r"V \text{ minus one}", r"V \text{ plus } N",
    r"V \text{, rejected}", r"V \text{ probably}", r"V\text{ cm} + {x}", r"V\text{ cm}, \{\}", r"V\text{ six}",
    r"V\text{ to six}", r"V\text{ less than}", r"V\text{ at most}", r"V\text{ point five}", r"V\text{ squared}",
    r"V\text{ I think}", r"V\text{ as well as six}", r"\text{N:} \approx V", r"x_{\text{N or}} = V", r"\text{six} = V",
    r"\text{N and} = V", r"\text{candidates N, } = V", r"\text{all besides} = V", r"V\text{ m} \ne \pi^{2}", "V:1:1",
    "V (=N)", "N (=V)", r"N \;(\approx V)", "V 或 N", "N个或V个", "不是V", r"N \pmod{V}", r"V \text{ for no } x",
    r"V\text{ m} \to \text{XV}", r"V\text{ m} \lor \text{XV m}", r"V\text{ over XV}",
)  # fmt: skip
BESIDE = (
    r"V \quad N", r"N \quad V", "V N", "N V", r"N\,V", r"V~N", r"N\ V", r"N \qquad V", "V\n\nN", "N\n\nV",
    r"\text{N} V", r"\text{N } V", r"N\text{ and a half }V", r"V\text{ and }N\text{ cm}", r"V\text{ cm }N",
    "N $V$", r"N\ $V$", "$N$ $V$", "$N$ $N$, $V$", r"\text{N or } $V$", r"\text{I give up, } $V$", "not $V$",
    "maybe $V$", r"\text{not} $V$", "$N$, $N$ or maybe $V$", "$V$ $N$", "{N}{V}", "{V}{N}", 'N" V',
    r"N \and V", r"N \hfil V", r"N\text{ }V", "|N| V", r"\boxed{V N}", r"\boxed{N \boxed{V}}", r"\boxed{V \boxed{N}}",
    r"N V\text{\begin}", r"N \quad V\mbox{\begin}", r"\text{I give up, } V\text{ \begin}",
    r"N \quad V\begin{vmatrix}1\end{vmatrix}", r"\begin{vmatrix}1\end{vmatrix}N V",
    r"N \quad\begin{pmatrix}V\end{pmatrix}",
    r"N\quad(V)", "N\n(V)", r"N\quad|V|", r"N\quad\lfloor V\rfloor", r"N\quad\times V", r"N\quad\{V\}", r"N\quad -V",
    r"N\\(V)", r"N\quad\frac{V}{1}", r"V\quad -N",
)  # fmt: skip
INTERVALS = (
    "(V, N)", "[V, N]", "[V, V]", "(V, V)", r"(-\infty, V)", r"(V, \infty)", r"[V, \infty)", r"(-\infty, V]",
    "V < x < N", "x > V", r"x \ge V", r"x \ne V", r"\{V, N\}", r"\{V\} \cup \{N\}", r"\{N, V\}", r"V \cup N",
    r"\{x : x^2 = V\}", "x : x = V", r"\{{x} : x=V\}", r"\{x \mid x=V\}",
    r"\langle V, N\rangle", r"x>V \text{ or } x<N", r"x>N \text{ and } x<V", r"\{x \mid x > V\}",
    r"x<V \text{ or } x>N",
    r"\{V, \ldots\}", r"[V, N) \cup \{V\}", "(V, V, V)", "(N, V)", "V-N", "V - N, V",
)  # fmt: skip
BOXES = (
    r"\boxed{V} or \boxed{N}.",
    r"$\boxed{N}$, $\boxed{V}$",
    r"\boxed{V}, \boxed{N}",
    r"\boxed{N}\boxed{V}",
    r"\boxed{N} and \boxed{V}",
    r"\boxed{\boxed{V}, \boxed{N}}",
    r"\boxed{V} \boxed{N}",
    r"It is \boxed{V}. No: \boxed{N}.",
    r"\boxed{N} \quad \text{or} \quad \boxed{V}",
    r"\boxed{V",
    r"\boxed{} \boxed{N}",
    r"\boxed N, \boxed{V}",
    r"\boxed{N}\\\boxed{V}",
    r"\boxed{V}\\ \boxed{N}",
)
BARE_BOXES = (
    r"\boxed V/N", r"\boxed V + N", r"\boxed V\frac12", r"\boxed V^{N}", r"\boxed V!", r"\boxed Vx", r"\boxed V\pi",
    r"\boxed V N",
    r"\boxed V\,000", r"\boxed V \cdot N", r"\boxed V.N", r"\boxed V,N",
)  # fmt: skip
CHAINS = (
    "x = V = N", "x = N = V", "V = N", "N = V", "N = x = V", "1 = 2 = V", "x = V, x = N", r"x \ne N = V", "N < V",
    r"V \approx N", r"N \approx V", r"x = N \approx V", r"x \approx V = N", "f(x) = N = V", r"x = V \text{ or } x = N",
    "V = V = N", "V > N", r"N \to V", "(N,N) = V", r"\{N\} = V", "y = N = V", r"\begin{pmatrix}N\\N\end{pmatrix} = V",
)  # fmt: skip
LETTERS = (
    r"\mathrm{i}", r"\mathrm{e}", r"\text{π}", r"\text{ pi}", r"\mathrm{x}", r"\text{x}", r"\text{ i}", r"\mathbf{n}",
)  # fmt: skip
PRODUCTS = (
    Template(r"V \cdot N", _zero), Template(r"N \cdot V", _zero), Template(r"\frac{V}{N}", _zero),
    Template(r"N(V)", _zero), Template(r"(V)(N)", _zero), Template(r"V^{N}", _is_its_power),
    # Beside a decimal: row `rounding`.
    Template(r"V + 10^{-400}", _has_point), Template(r"V + e^{-800}", _has_point), Template("10^{-400}"),
    Template(r"{N \choose V}"),
    Template(r"V + N"), Template("-N"), Template("N!"), Template(r"\sqrt{N}"),
    Template(r"0 \cdot \text{anything}"), Template(r"\text{anything} \cdot 0"),
    Template(r"0 \times (\text{I give up})"),
    Template("0 I give up"), Template("I give up 0"), Template("0abc"), Template(r"0 \cdot a"), Template(r"a - a"),
    Template(r"\text{no idea} - \text{no idea}"), Template(r"x \cdot 0 + N"), Template(r"\frac{0}{a}"),
    Template(r"V + a - a", _has_a), Template(r"V \cdot \frac{a}{a}", _has_a), Template(r"a^0"),
    Template(r"\frac{a}{a}"),
    Template(r"N\%"), Template(r"N\text{ cm}"), Template(r"\$N"),
    *(Template(f"V{letter}", _zero) for letter in LETTERS),
    Template("(V)'", _zero), Template(r"V\text{ m}\cdot\pi^{2}", _zero), Template(r"V\text{ m}/\theta^{2}", _zero),
    Template(r"0 \cdot f(N)", is_one_of("0")),
    *(Template(f"V{unit}", _has_number) for unit in (r"\text{ K L M}", " cm", " west", r"\mathrm{ K}", r"\text{ (D)}")),
    Template("x^7 = V", _has_no_x), Template("y = x^7 = V", _has_no_x), Template("f(x) = 7x^7 = V", _has_no_x),
    Template("€V", _has_no_dollar), Template("V€", _has_no_dollar),
)  # fmt: skip
PAIRS = (
    "A B", r"A \quad B", r"A\,B", "A, B", "(A, B)", r"\{A, B\}", "[A, B]", r"A\frac{B}{1}", r"A \frac{B}{1}", "A; B",
    r"A\text{ and }B", "A:B", "A B/1", r"A\ B", "A(B)", r"A\cfrac{B}{1}", r"A{\frac{B}{1}}", r"A\,\frac{B}{1}", "A\n+B",
    "(A)(B)", r"\left(A\right)\left(B\right)", "A[B]", r"\binom{A}{1}\binom{B}{1}", r"(A)\frac{B}{1}", "{A}(B)",
    r"A\left(\frac{B}{1}\right)", r"A\quad +B", r"A\quad\begin{vmatrix}B\end{vmatrix}",
)  # fmt: skip
UNIVERSAL = (
    "", " ", "?", r"\text{}", "{}", "()", "[]", ",", "=", ".", r"\frac{0}{0}", "1/0", "0/0", "nan", r"\text{nan}",
    r"\text{None}", "null", r"\text{answer}", r"\text{the answer}", r"\text{any number}", r"\text{undefined or not}",
    "0=0", "1=1", "x=x", "1=2", "x+1=x+1", "0<1", r"x \in \mathbb{R}", r"\mathbb{R}", r"\mathbb{Z}", r"\mathbb{C}",
    r"(-\infty, \infty)", r"[-\infty, \infty]",
    r"\lbrack-\infty,\infty\rbrack", r"[{-\infty},{\infty}]", r"[-\,\infty,\infty)", r"\{-\infty,\infty\}",
    r"-\infty, \infty", r"\infty", r"-\infty", r"\pm \infty", r"\{\}", r"\emptyset",
    "A, B, C, D", "ABCDE", "A B C D E", r"\text{A or B}", r"\text{(A) (B) (C) (D)}", "x", "a", "n", "A", "i", "e",
    r"\pi", "0", "1", "2", "0.0", "0.0000001", "1.0000001", r"10^{-20}", "-0", r"0\%", r"\text{0}", "True", r"\top",
    r"1, 2, 3, 4, 5, 6, 7, 8, 9",
    r"\{0, 1, 2, 3, 4, 5\}", "0 or 1", "0, 1",
)  # fmt: skip
_SAME = (
    (" or ", ", "),
    (r"0\%", "0"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"x \in \mathbb{R}", r"(-\infty,\infty)"),
)
ROWS = (
    Template("V, V", row="duplicates"), Template(r"\{V\}", row="singleton_set"),
    Template(r"V\%", row="percent_as_number"),
    Template(r"V\text{ cm}", row="units"), Template(r"V \pmod{N}", row="units"),
    Template(r"\$V", row="currency"), Template(r"V^\circ", row="degrees"),
    Template("x = V", row="assignment"), Template(r"x \approx V", row="approximation"),
    Template(r"a + b = V", row="equation"),
)  # fmt: skip


def templates() -> list[Template]:
    """All templates."""
    wrong = [Template(text) for text in (*HEDGES, *DENIALS, *INTERVALS, *BOXES, *CHAINS)]
    wrong += [Template(text, _zero_matrix) for text in BESIDE]
    pairs = [Template(text, numerals_only=True) for text in (*PAIRS, *BARE_BOXES)]
    return [
        *wrong,
        *pairs,
        *PRODUCTS,
        *(Template(text, is_one_of(text, *(text.replace(*same) for same in _SAME))) for text in UNIVERSAL),
        *ROWS,
    ]


def all_golds(folder: Path) -> list[str]:
    """The distinct golds of all files of the data folder, in their order."""
    golds: dict[str, None] = {}
    for name, column in _FILES.items():
        path = folder / name
        if not path.is_file():
            raise SystemExit(f"{path} is missing. Name the folder with the data files with --data.")
        rows = (
            json.loads(path.read_text()) if path.suffix == ".json" else map(json.loads, path.read_text().splitlines())
        )
        for row in rows:
            cell = row[column]
            text = ", ".join(cell) if isinstance(cell, list) else str(cell or "")
            boxed = last_boxed(text)
            gold = (text.rpartition("####")[2] if boxed is None else boxed).strip()
            if any(character.isalnum() for character in gold):
                golds.setdefault(gold)
    return list(golds)


def pairs(golds: list[str], size: int, seed: int, every: bool = False) -> Iterator[tuple[Template, Gold, str]]:
    """Templates filled with golds: all of them, or `size` of them at random; `every`: each template at least once."""
    rng = random.Random(seed)
    made = []
    for text in golds:
        other = rng.choice([n for n in (rng.randint(1009, 9973) for _ in range(9)) if str(n) not in text])
        made.append(Gold(text, plain_number(normal_form(text)), other))
    found = ((template, gold, template.fill(gold)) for gold in made for template in templates())
    all_pairs = [(template, gold, text) for template, gold, text in found if text is not None]
    if size >= len(all_pairs):
        return iter(all_pairs)
    order = rng.sample(range(len(all_pairs)), len(all_pairs))
    first = {all_pairs[i][0].text: i for i in reversed(order)}.values() if every else ()
    chosen = list(dict.fromkeys([*first, *order]))[: max(size, len(first))]
    return (all_pairs[i] for i in sorted(chosen))


def accepted_by(template: Template, gold: Gold) -> str | None:
    """The reason to accept the answer: a row of docs/rewards.md, or ``right``; None if there is none."""
    if template.row is not None:
        return template.row
    if template.right(gold):
        return "right"
    answer = last_boxed(template.fill(gold) or "")
    # What stands behind the letter of an option is taken for the option's text.
    return "option" if _OPTION.fullmatch(normal_form(gold.text)) and boxed_letter(answer or "") else None


def run(reward: Any, chosen: list[tuple[Template, Gold, str]], progress: Path | None = None) -> dict[str, Any]:
    """Grade the pairs in chunks, whose results are stored in the file `progress`."""
    digest = hashlib.sha256("\n".join([reward.version, *(f"{g.text}\t{t}" for _, g, t in chosen)]).encode()).hexdigest()
    known: dict[int, list[int]] = {}
    if progress is not None and progress.is_file():
        lines = [json.loads(line) for line in progress.read_text().splitlines()]
        known = {line["chunk"]: line["accepted"] for line in lines if line["of"] == digest}
    free, counts = [], Counter[str]()
    for start in tqdm(range(0, len(chosen), _CHUNK), unit="chunk", mininterval=10, disable=len(chosen) <= _CHUNK):
        chunk = chosen[start : start + _CHUNK]
        if start not in known:
            scores = reward([], [text for _, _, text in chunk], [gold.text for _, gold, _ in chunk])
            known[start] = [i for i, score in enumerate(scores) if score]
            if progress is not None:
                with progress.open("a") as file:
                    file.write(json.dumps({"of": digest, "chunk": start, "accepted": known[start]}) + "\n")
        for i in known[start]:
            template, gold, text = chunk[i]
            why = accepted_by(template, gold)
            counts[why or "free"] += 1
            if why is None:
                free.append({"template": template.text, "gold": gold.text, "completion": text})
    return {"pairs": len(chosen), "accepted": dict(counts), "free_points": free}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    parser = reward_parser(__doc__, "folder with the data files", pairs=220_000, timeout=2.0)
    progress = Path(tempfile.gettempdir()) / "reward_hacking.jsonl"
    parser.add_argument("--progress", type=Path, default=progress, help=f"file from which a run resumes ({progress})")
    options = parser.parse_args(argv)
    golds = FEW_AND_HARD if options.quick else all_golds(options.data or DATA)
    size = min(options.pairs, 600) if options.quick else options.pairs
    began = time.perf_counter()
    reward = MathVerifyReward(num_workers=options.workers, timeout=options.timeout)
    chosen = list(pairs(golds, size, options.seed, every=True))
    found = run(reward, chosen, None if options.quick else options.progress)
    reward.close()
    results = {
        **{name: getattr(options, name) for name in ("seed", "timeout", "workers")},
        "golds": len(golds), "templates": len(templates()), "version": reward.version,
        "seconds": round(time.perf_counter() - began, 1), **found,
    }  # fmt: skip
    for entry in found["free_points"][:200]:
        print(f"{entry['template']!r:40} gold {entry['gold']!r} completion {entry['completion']!r}")
    print(f"{results['pairs']} pairs, accepted {results['accepted']}, {len(found['free_points'])} free points")
    if not options.quick:
        save("reward_hacking", results)
    return results


if __name__ == "__main__":
    main()
