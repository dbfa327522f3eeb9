"""A task like RLVR in small: most prompts nearly solved, some hard, some impossible, and long rollouts that are mostly
filler.

A prompt has a kind and two parts, each a sum of three digits, ``k7 4 2 5 ; 3 1 9 :``. A rollout works each part off:
it names a strategy (s0 to s7), then adds digit by digit with random filler words between, and at the end it repeats the
two results (mod 10), ``s3 f1 f9 f4 f0 f2 2 6 f7 f7 f1 f8 f3 5 1 s5 ... = 1 3``. Only these two digits are verified.

What makes it like RLVR:

1. With a *strategy* that its kind accepts the policy gets a part right, nearly always; with another it gets it wrong,
   nearly always, since it was taught so. Kinds of easy prompts accept every strategy; a kind of hard prompts accepts,
   in each of its two parts, two of the seven that are not the warm start's favourite. Two decisions must be right, so
   that sampling makes one of some twenty rollouts right, and sharpening what is likely makes none. Strategies serve
   equally many kinds: no strategy is good by itself.
2. Impossible prompts look like the others, easy and hard ones in their shares, but have a solution that nothing
   matches, as a wrong label has.
3. Of the 34 tokens of a rollout 20 are filler, 2 decide, and the others are all but determined by those before.

`TASKS`: ``mixed``, and ``alike``, where every prompt has the same medium difficulty and there is nothing to select.
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

STRATEGIES, FILLERS, FILLER = 8, 16, 5  # words of each sort; filler words before each addition
FAVOURITE = 0.4  # probability of s0 in a demonstration, the others share the rest
MISTAKE, MISS = 0.02, 0.95  # an addition is wrong; the result of a part is, with a strategy that is not accepted
PARTS, DIGITS = 2, 3  # of a prompt; of a part
TOKENS = PARTS * (1 + (DIGITS - 1) * (FILLER + 2)) + 1 + PARTS + 1  # of a rollout, the end token included
NOTHING = "?"  # the solution of an impossible prompt: no word of the vocabulary

ANY = frozenset(range(STRATEGIES))
OTHERS = STRATEGIES - 1  # those that are not the favourite


def _others(*numbers: int) -> frozenset[int]:
    """Strategies that are not the favourite, by their number modulo `OTHERS`."""
    return frozenset(1 + number % OTHERS for number in numbers)


# Of each kind the strategies that it accepts in each part. Each of s1 to s7 serves equally many kinds of a family.
EASY = {f"k{i}": (ANY, ANY) for i in range(4)}
HARD = {f"k{4 + i}": (_others(i, i + 2), _others(3 * i + 1, 3 * i + 4)) for i in range(OTHERS)}
MEDIUM = {
    f"m{i}": (_others(*range(OTHERS)) - _others(i), _others(*range(OTHERS)) - _others(3 * i)) for i in range(OTHERS)
}
KINDS: dict[str, tuple[frozenset[int], frozenset[int]]] = {**EASY, **HARD, **MEDIUM}


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
    "mixed": Task({"easy": 0.68, "hard": 0.17, "impossible": 0.15}, {"easy": (*EASY,), "hard": (*HARD,)}, "hard"),
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
        return " ".join(str(sum(part) % 10) for part in self.parts)


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
    """What the warm start is taught to write: strategies at random (or `strategies`), filler, and sums with the errors
    that these strategies bring."""
    words, results = list[str](), list[str]()
    for number, part in enumerate(shown.parts):
        weights = [FAVOURITE, *[(1 - FAVOURITE) / OTHERS] * OTHERS]
        strategy = strategies[number] if strategies else random.choices(range(STRATEGIES), weights)[0]
        accepted = strategy in KINDS[shown.kind][number]
        words.append(f"s{strategy}")
        total = part[0]
        for place, digit in enumerate(part[1:], start=1):
            last = place == DIGITS - 1
            total = (total + digit) % 10
            if random.random() < (MISS if last and not accepted else MISTAKE):
                total = (total + random.randrange(1, 10)) % 10
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
