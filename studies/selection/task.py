"""A small task that resembles RLVR: most prompts are nearly solved, some are hard, some impossible; rollouts are long
and mostly filler.

A prompt has a kind and two parts, each a sum of three digits, ``k7 4 2 5 ; 3 1 9 :``. A rollout works on one part after
the other: it names a strategy (s0 to s3) and the number that this strategy starts with, then adds digit by digit with
random filler words in between. At the end it repeats the two results (mod 10): ``s3 8 f1 f9 f4 f0 f2 2 0 f7 f7 f1 f8 f3
5 5 s0 4 ... = 5 4``. Only these two are verified.

It resembles RLVR in three respects:

1. For prompts of easy kinds every strategy is right and starts with the first digit. For prompts of hard kinds strategy
   sK starts K + 1 higher, and each of the two parts needs one particular K, which depends on the kind and is stated
   nowhere. The warm start prefers another one. Since two decisions must be right, few rollouts are right, and making
   the likely choice more likely makes none right. All strategies are right for equally many kinds, so none is good in
   general. The policy cannot do without a strategy either: it has learned how to continue from one, and hardly ever
   starts in another way.
2. Impossible prompts look like the others (easy and hard ones in proportion), but nothing matches their solution, as
   with a wrong label.
3. Of the 36 tokens of a rollout 20 are filler, 2 decide, and the others are almost determined by the previous ones.

`TASKS`: ``mixed``, and ``alike``, where every prompt has the same medium difficulty (one of its two parts needs one
particular strategy) and there is nothing to select.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, set_seed

from examples.quickstart.warm_start import END, PAD, build_model
from studies.training import started

STRATEGIES, FILLERS, FILLER = 4, 16, 5  # number of strategies and of filler words; filler words before each addition
FAVOURITE, NEEDED = 0.45, 0.28  # probability of a part's favourite strategy in a demonstration, and of the right one
MISTAKE = 0.02  # probability that a digit that a demonstration works out is wrong
PARTS, DIGITS = 2, 3  # of a prompt; of a part
TOKENS = PARTS * (2 + (DIGITS - 1) * (FILLER + 2)) + 1 + PARTS + 1  # of a rollout, the end token included
NOTHING = "?"  # the solution of an impossible prompt: no word of the vocabulary


@dataclass(frozen=True)
class Kind:
    """What the prompts of a kind have in common.

    Attributes:
        needs: for each part the right strategy, None if every strategy is right.
        favourites: for each part the strategy that the warm start prefers, which is never the needed one.
    """

    needs: tuple[int | None, ...]
    favourites: tuple[int, ...]

    def weights(self, part: int) -> list[float]:
        """Probabilities of the strategies in the demonstrations of a part."""
        likely = {self.favourites[part]: FAVOURITE}
        if (need := self.needs[part]) is not None:
            likely[need] = NEEDED
        rest = (1 - sum(likely.values())) / (STRATEGIES - len(likely))
        return [likely.get(strategy, rest) for strategy in range(STRATEGIES)]

    def start(self, part: int, digit: int, strategy: int) -> int:
        """The number that a strategy starts with in a part whose first digit is `digit`."""
        return (digit + (0 if self.needs[part] is None else 1 + strategy)) % 10


def _kind(number: int, *needs: int | None) -> Kind:
    """A kind whose favourite strategy for each part is not the needed one; which one it is depends on `number`."""
    favourites = ((need or 0) + 1 + (number + part) % (STRATEGIES - 1) for part, need in enumerate(needs))
    return Kind(needs, tuple(favourite % STRATEGIES for favourite in favourites))


EASY = {f"k{i}": _kind(i, None, None) for i in range(4)}
# In each part, every strategy is the right one for exactly one kind.
HARD = {f"k{4 + i}": _kind(i, i, (i + 1) % STRATEGIES) for i in range(STRATEGIES)}
MEDIUM = {
    **{f"m{i}": _kind(i, i, None) for i in range(STRATEGIES)},
    **{f"m{STRATEGIES + i}": _kind(i, None, i) for i in range(STRATEGIES)},
}
KINDS = {**EASY, **HARD, **MEDIUM}


@dataclass(frozen=True)
class Task:
    """A mix of prompts.

    Attributes:
        shares: share of each family among the training prompts.
        kinds: the kinds of each solvable family. ``impossible`` prompts are drawn from these families by their shares.
        judged: the family whose held-out accuracy counts.
    """

    shares: Mapping[str, float]
    kinds: Mapping[str, tuple[str, ...]]
    judged: str


TASKS = {
    "mixed": Task({"easy": 0.66, "hard": 0.19, "impossible": 0.15}, {"easy": (*EASY,), "hard": (*HARD,)}, "hard"),
    "alike": Task({"alike": 1.0}, {"alike": (*MEDIUM,)}, "alike"),
}


@dataclass(frozen=True)
class Problem:
    """A prompt: its kind and the digits of its parts."""

    kind: str
    parts: tuple[tuple[int, ...], ...]

    @property
    def prompt(self) -> str:
        return f"{self.kind} {' ; '.join(' '.join(map(str, part)) for part in self.parts)} :"

    @property
    def solution(self) -> str:
        kind = KINDS[self.kind]
        starts = [kind.start(i, part[0], kind.needs[i] or 0) for i, part in enumerate(self.parts)]
        return " ".join(str((start + sum(part[1:])) % 10) for start, part in zip(starts, self.parts, strict=True))


def problem(kinds: Sequence[str], random: Random) -> Problem:
    """A random problem of one of `kinds`."""
    parts = tuple(tuple(random.randrange(10) for _ in range(DIGITS)) for _ in range(PARTS))
    return Problem(random.choice(kinds), parts)


def rows_of(families: Sequence[str], task: Task, random: Random, taken: set[str]) -> Dataset:
    """One problem for each entry of `families`, with columns ``prompt``, ``solution``, ``prompt_id`` and ``family``.

    None of their prompts is in `taken`, to which they are added.
    """
    solvable = {family: share for family, share in task.shares.items() if family in task.kinds}
    rows = []
    for family in families:
        possible = family in task.kinds
        like = family if possible else random.choices([*solvable], [*solvable.values()])[0]
        while (made := problem(task.kinds[like], random)).prompt in taken:
            pass
        taken.add(made.prompt)
        solution = made.solution if possible else NOTHING
        name = hashlib.sha256(made.prompt.encode()).hexdigest()[:16]
        rows.append({"prompt": made.prompt, "solution": solution, "prompt_id": name, "family": family})
    return Dataset.from_list(rows)


def datasets(task: Task, train: int, held_out: int, seed: int = 0) -> tuple[Dataset, dict[str, Dataset]]:
    """Training and held-out prompts.

    The `train` training prompts have the shares of `task` and are in random order. There are `held_out` other prompts
    of each solvable family.
    """
    random, taken = Random(seed), set[str]()
    counts = {family: round(share * train) for family, share in task.shares.items()}
    counts[max(counts, key=lambda family: counts[family])] += train - sum(counts.values())
    families = [family for family, count in counts.items() for _ in range(count)]
    random.shuffle(families)
    trained = rows_of(families, task, random, taken)
    return trained, {family: rows_of([family] * held_out, task, random, taken) for family in task.kinds}


def reward(completions: Sequence[str], solution: Sequence[str], **_: Any) -> list[float]:
    """1 if the text after the last ``=`` is the solution, else 0."""
    return [
        float("=" in text and text.rsplit("=", 1)[1].split() == gold.split())
        for text, gold in zip(completions, solution, strict=True)
    ]


def counting(counts: dict[str, int]) -> Callable[..., list[float]]:
    """`reward`, which also counts the rollouts of each family."""

    def counted(completions: Sequence[str], solution: Sequence[str], family: Sequence[str], **_: Any) -> list[float]:
        for name in family:
            counts[name] = counts.get(name, 0) + 1
        return reward(completions, solution)

    return counted


def demonstration(shown: Problem, random: Random, strategies: Sequence[int] | None = None) -> str:
    """A demonstration for the warm start: random strategies (or `strategies`), filler, and sums with some mistakes."""

    def written(digit: int) -> int:
        return (digit + (random.randrange(1, 10) if random.random() < MISTAKE else 0)) % 10

    words, results, kind = list[str](), list[str](), KINDS[shown.kind]
    for number, part in enumerate(shown.parts):
        strategy = strategies[number] if strategies else random.choices(range(STRATEGIES), kind.weights(number))[0]
        total = written(kind.start(number, part[0], strategy))
        words += [f"s{strategy}", str(total)]
        for digit in part[1:]:
            total = written(total + digit)
            words += [f"f{random.randrange(FILLERS)}" for _ in range(FILLER)]
            words += [str(digit), str(total)]
        results.append(str(total))
    return " ".join([*words, "=", *results])


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word of prompts and rollouts."""
    words = [PAD, END, *map(str, range(10)), ":", ";", "=", *KINDS]
    words += [f"s{i}" for i in range(STRATEGIES)] + [f"f{i}" for i in range(FILLERS)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, padding_side="left")


def warm_policy(
    task: Task, seed: int, steps: int, *, shown: int = 20_000, batch: int = 128, rate: float = 4e-3
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A Qwen3 with 0.1M parameters, supervised on `demonstration`s, the same number for each family."""
    set_seed(seed)
    random, tokenizer = Random(seed + 10), build_tokenizer()
    kinds = [*task.kinds.values()]
    texts = []
    for number in range(shown):
        made = problem(kinds[number % len(kinds)], random)
        texts.append(f"{made.prompt} {demonstration(made, random)} {END}")
    ids = torch.tensor(tokenizer(texts)["input_ids"])
    labels = ids.clone()
    labels[:, : ids.shape[1] - TOKENS] = -100
    model = build_model(tokenizer, hidden_size=64, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    model.train()
    for _ in tqdm(range(steps), desc="warm start", unit="step", mininterval=10):
        rows = torch.randint(len(ids), (batch,))
        model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, tokenizer


def warm_model(dataset: Dataset, name: str, seed: int, folder: Path, steps: int) -> None:
    """Ensure that `folder` has the model of `warm_policy` for the task `name` (`started`)."""
    settings = {"policy": "selection", "task": name, "seed": seed, "steps": steps}
    started(folder, dataset, settings, partial(warm_policy, TASKS[name], seed, steps))
