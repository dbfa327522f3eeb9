"""A task like RLVR in small: most prompts nearly solved, some hard, some impossible, and long rollouts that are mostly
filler.

A prompt has a kind and two parts, each a sum of three digits, ``k7 4 2 5 ; 3 1 9 :``. A rollout works each part off: it
names a strategy (s0 to s3) and where that starts, then adds digit by digit with random filler words between; at the end
it repeats the two results (mod 10): ``s3 8 f1 f9 f4 f0 f2 2 0 f7 f7 f1 f8 f3 5 5 s0 4 ... = 5 4``. Only these two are
verified.

What makes it like RLVR:

1. Prompts of easy kinds are right with any strategy, each of which starts at the first digit there. In prompts of hard
   kinds strategy sK starts K + 1 further, and each of the two parts needs one particular K, which the kind decides and
   nothing tells. The warm start prefers another one. Two decisions must be right, so that few rollouts are, and
   sharpening what is likely makes none right. Each strategy serves as many kinds as each other one, so none is good by
   itself. Nor can the policy do without: it has learned how to go on from a strategy, and hardly ever starts elsewhere.
2. Impossible prompts look like the others, easy and hard ones in their shares, but have a solution that nothing
   matches, as a wrong label has.
3. Of the 36 tokens of a rollout 20 are filler, 2 decide, and the others are all but determined by those before.

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

STRATEGIES, FILLERS, FILLER = 4, 16, 5  # words of each sort; filler words before each addition
FAVOURITE, NEEDED = 0.45, 0.28  # probability of a part's favourite strategy in a demonstration, and of the right one
MISTAKE = 0.02  # probability that a digit that a demonstration works out is wrong
PARTS, DIGITS = 2, 3  # of a prompt; of a part
TOKENS = PARTS * (2 + (DIGITS - 1) * (FILLER + 2)) + 1 + PARTS + 1  # of a rollout, the end token included
NOTHING = "?"  # the solution of an impossible prompt: no word of the vocabulary


@dataclass(frozen=True)
class Kind:
    """What the prompts of a kind have in common.

    Attributes:
        needs: of each part the strategy that is right, None where each is.
        favourites: of each part the strategy that the warm start prefers, never the right one.
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
        """Where a strategy starts in a part that begins with `digit`."""
        return (digit + (0 if self.needs[part] is None else 1 + strategy)) % 10


def _kind(number: int, *needs: int | None) -> Kind:
    """The favourite of a part is another strategy than the one that it needs; which one, differs from kind to kind."""
    favourites = ((need or 0) + 1 + (number + part) % (STRATEGIES - 1) for part, need in enumerate(needs))
    return Kind(needs, tuple(favourite % STRATEGIES for favourite in favourites))


EASY = {f"k{i}": _kind(i, None, None) for i in range(4)}
# Every strategy is the right one of one kind, in each part.
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
        shares: of the families among the training prompts.
        kinds: of each family, a solvable one; those of ``impossible`` are drawn from them by their shares.
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
    """One of a kind among `kinds`."""
    parts = tuple(tuple(random.randrange(10) for _ in range(DIGITS)) for _ in range(PARTS))
    return Problem(random.choice(kinds), parts)


def rows_of(families: Sequence[str], task: Task, random: Random, taken: set[str]) -> Dataset:
    """A problem of each of `families`, none of them in `taken`, where they are put: ``prompt``, ``solution``,
    ``prompt_id``, ``family``."""
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
    """`train` prompts to train on, in the shares of `task` and in random order; and `held_out` others of each family
    that can be solved."""
    random, taken = Random(seed), set[str]()
    counts = {family: round(share * train) for family, share in task.shares.items()}
    counts[max(counts, key=lambda family: counts[family])] += train - sum(counts.values())
    families = [family for family, count in counts.items() for _ in range(count)]
    random.shuffle(families)
    trained = rows_of(families, task, random, taken)
    return trained, {family: rows_of([family] * held_out, task, random, taken) for family in task.kinds}


def reward(completions: Sequence[str], solution: Sequence[str], **_: Any) -> list[float]:
    """1 where what follows the last ``=`` is the solution, else 0."""
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
    """What the warm start is taught to write: strategies at random (or `strategies`), filler, sums with mistakes."""

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
    """A Qwen3 of 0.1M parameters, supervised on `demonstration`s; as many of each family."""
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
    """`warm_policy` of the task `name` in `folder`; the one that is there if it is the same (`started`)."""
    settings = {"policy": "selection", "task": name, "seed": seed, "steps": steps}
    started(folder, dataset, settings, partial(warm_policy, TASKS[name], seed, steps))
