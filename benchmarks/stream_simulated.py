"""Where does `rollouts: stream` save time, and how stale are its rollouts? A simulation, with rates of your choice.

    python -m benchmarks.stream_simulated [--quick] [--rate NAME=VALUE ...]

Nothing here is measured: seconds follow from the rates in `Rates`, which are set to what the data sheet of an H100
suggests for a dense model of 8B parameters. Which rollouts a batch takes is decided by the trainer's own rule,
`basis_rl.functional.pacing`. Variants, all with equal rollouts per optimizer step, each of which is one batch:

- sync groups, sync singles: all GPUs draw a batch, with 8 rollouts per prompt or 1, then all GPUs train on it.
- prefetch: trainer and server have GPUs of their own; the next batch is drawn while one is trained on.
- stream groups, stream singles: `max_staleness` S, `batches_in_flight` B.

How many GPUs the trainer has is chosen for each variant and regime, to minimise its time. With one GPU all variants
draw and train in turns; the server's rollouts stand still meanwhile.

The server: the rows on a GPU move on together, a decode step takes ``max(weights, row * rows) + cache * rows`` seconds,
at most `capacity` rows; further requests wait for a place. Rollouts spread evenly over GPUs; prefill costs nothing.
Rollouts under way go on after a weight sync, with the new weights. Lengths are log-normal, half of the variance of the
logarithm is the prompt's. A rollout with tools has 1 to 7 turns of equal length, and waits for a tool between them.

Results: ``benchmarks/results/stream_simulated.json`` and ``.png``.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from basis_rl.functional.pacing import batches_left, next_batch
from basis_rl.report.plots import LIGHT
from benchmarks.common import RESULTS, parser_of, save

GROUP = 8
LONGEST = 32_768
# The logarithm's standard deviation for a median of 1 s and 1 % above 20 s.
TOOL_SPREAD = math.log(20.0) / 2.326


@dataclass(frozen=True)
class Rates:
    """Seconds, for one GPU.

    Attributes:
        weights: a decode step reads the weights.
        row: a decode step's products, for each row.
        cache: a decode step reads the keys and values of a row.
        capacity: rows that fit into memory.
        training: scoring, forward, backward and update, for each token.
        push: one weight sync, whatever the number of GPUs; server and trainer stand still.
    """

    weights: float = 0.010
    row: float = 4e-5
    cache: float = 6e-5
    capacity: int = 192
    training: float = 2e-4
    push: float = 3.0

    def step(self, rows: float) -> float:
        return max(self.weights, self.row * rows) + self.cache * rows


@dataclass(frozen=True)
class Regime:
    """What is trained: mean and coefficient of variation of the lengths, tools, GPUs, rollouts per step, rates."""

    mean: float
    spread: float
    tools: bool = False
    gpus: int = 8
    rollouts: int = 512
    rates: Rates = field(default_factory=Rates)


@dataclass(frozen=True)
class Variant:
    """Rollouts per prompt, batches under way, the staleness that is allowed, and whether all GPUs do both in turns."""

    group: int
    batches: int
    staleness: int
    in_turns: bool = False


@dataclass
class Rollout:
    """The unit it belongs to, tokens that are still to be drawn, turn by turn, and the tools' seconds between them."""

    unit: int
    turns: deque[float]
    delays: deque[float]


def drawn(regime: Regime, group: int, seed: int) -> Iterator[list[Rollout]]:
    """Prompts without end, each with the rollouts of it."""
    rng = np.random.default_rng(seed)
    sigma = math.sqrt(math.log1p(regime.spread**2))
    prompts = 512
    for block in itertools.count():
        own = rng.normal(0.0, sigma * math.sqrt(0.5), (prompts, group))
        shared = rng.normal(0.0, sigma * math.sqrt(0.5), (prompts, 1))
        lengths = np.exp(math.log(regime.mean) - sigma**2 / 2 + own + shared).clip(1.0, LONGEST).tolist()
        turns = rng.integers(1, 8, (prompts, group)) if regime.tools else np.ones((prompts, group), dtype=int)
        delays = np.exp(rng.normal(0.0, TOOL_SPREAD, (prompts, group, 6))).tolist() if regime.tools else None
        for prompt, counts in enumerate(turns.tolist()):
            yield [
                Rollout(
                    block * prompts + prompt,
                    deque([lengths[prompt][index] / count] * count),
                    deque(delays[prompt][index] if delays else ()),
                )
                for index, count in enumerate(counts)
            ]


class Server:
    """Draws rollouts. Rows have a common clock of tokens, so an event costs the logarithm of what is under way."""

    def __init__(self, rates: Rates, gpus: int, ended: Callable[[Rollout], None]) -> None:
        self.rates = rates
        self.gpus = gpus
        self.ended = ended
        self.now = 0.0
        self.tokens = 0.0
        self._count = 0
        self._rows: list[tuple[float, int, Rollout]] = []
        self._tools: list[tuple[float, int, Rollout]] = []
        self._queue: deque[Rollout] = deque()

    def submit(self, rollout: Rollout) -> None:
        self._count += 1
        if len(self._rows) >= self.rates.capacity * self.gpus:
            self._queue.append(rollout)
        else:
            heapq.heappush(self._rows, (self.tokens + rollout.turns[0], self._count, rollout))

    def stand_still(self, seconds: float) -> None:
        """Time goes by, for tools too, without a token."""
        self.now += seconds

    def advance(self, until: float = math.inf) -> None:
        """Go on to the next event, or to time `until` if that comes first."""
        pace = self.rates.step(len(self._rows) / self.gpus)
        turn_ends = self.now + (self._rows[0][0] - self.tokens) * pace if self._rows else math.inf
        tool_ends = self._tools[0][0] if self._tools else math.inf
        event = min(turn_ends, max(tool_ends, self.now))
        reached = min(event, until)
        if self._rows:
            self.tokens += (reached - self.now) / pace
        self.now = reached
        if event > until:
            return
        if turn_ends <= event:
            self._end_turn(heapq.heappop(self._rows))
        else:
            self.submit(heapq.heappop(self._tools)[2])

    def _end_turn(self, row: tuple[float, int, Rollout]) -> None:
        self.tokens, number, rollout = row
        rollout.turns.popleft()
        if rollout.turns:
            heapq.heappush(self._tools, (self.now + rollout.delays.popleft(), number, rollout))
        else:
            self.ended(rollout)
        if self._queue:
            self.submit(self._queue.popleft())


class Run:
    """Steps of one variant in one regime, with `trainers` GPUs for the trainer."""

    def __init__(self, regime: Regime, variant: Variant, trainers: int, seed: int) -> None:
        self.regime = regime
        self.variant = variant
        self.trainers = regime.gpus if variant.in_turns else trainers
        self.size = regime.rollouts // variant.group
        self.prompts = drawn(regime, variant.group, seed)
        self.server = Server(regime.rates, regime.gpus if variant.in_turns else regime.gpus - trainers, self._end)
        # Of each prompt under way its step, rollouts that have not ended, and tokens.
        self.began: dict[int, int] = {}
        self.open: dict[int, int] = {}
        self.lengths: dict[int, float] = {}
        self.ended: list[int] = []

    def submit(self, batches: int, step: int) -> None:
        for _ in range(batches * self.size):
            rollouts = next(self.prompts)
            unit = rollouts[0].unit
            self.began[unit] = step
            self.open[unit] = len(rollouts)
            self.lengths[unit] = sum(sum(each.turns) for each in rollouts)
            for rollout in rollouts:
                self.server.submit(rollout)

    def _end(self, rollout: Rollout) -> None:
        self.open[rollout.unit] -= 1
        if not self.open[rollout.unit]:
            del self.open[rollout.unit]
            self.ended.append(rollout.unit)

    def wait(self, step: int) -> list[int]:
        """The prompts of the next batch, as soon as the rule gives one."""

        def left(unit: int) -> int:
            return batches_left(step - self.began[unit], self.variant.staleness, 1, 1)

        known = 0
        while True:
            # The rule cannot wait for a prompt that may let as many batches pass as are under way.
            due = any(left(unit) < self.variant.batches for unit in self.ended[known:])
            if len(self.ended) >= self.size and (due or known < self.size):
                chosen = next_batch([left(unit) for unit in self.ended], [left(unit) for unit in self.open], self.size)
                if chosen is not None:
                    taken = [self.ended[index] for index in chosen]
                    kept = set(taken)
                    self.ended = [unit for unit in self.ended if unit not in kept]
                    return taken
            known = len(self.ended)
            self.server.advance()

    def take(self, steps: int) -> Iterator[tuple[float, float, list[int]]]:
        """Of each step its end, the seconds that the trainer has waited, and the ages of its prompts."""
        self.submit(self.variant.batches, 0)
        for step in range(steps):
            self.server.stand_still(self.regime.rates.push)
            if not self.variant.batches:
                self.submit(1, step)
            began = self.server.now
            taken = self.wait(step)
            waited = self.server.now - began
            if self.variant.batches:
                self.submit(1, step)
            seconds = sum(self.lengths[unit] for unit in taken) * self.regime.rates.training / self.trainers
            if self.variant.in_turns:
                self.server.stand_still(seconds)
            else:
                ends = self.server.now + seconds
                while self.server.now < ends:
                    self.server.advance(ends)
            yield self.server.now, waited, [step - self.began.pop(unit) for unit in taken]


@dataclass(frozen=True)
class Scale:
    """Steps that are left out at the beginning, and steps that count."""

    first: int = 10
    steps: int = 40


def outcome(regime: Regime, variant: Variant, trainers: int, scale: Scale) -> dict[str, float]:
    """Means over the steps that count."""
    steps = list(Run(regime, variant, trainers, seed=0).take(scale.first + scale.steps))
    counted = steps[scale.first :]
    seconds = (steps[-1][0] - steps[scale.first - 1][0]) / scale.steps
    ages = [age for _, _, each in counted for age in each]
    return {
        "trainers": regime.gpus if variant.in_turns else trainers,
        "seconds": seconds,
        "waits": sum(waited for _, waited, _ in counted) / scale.steps / seconds,
        "staleness": sum(ages) / len(ages),
        "largest": max(ages),
    }


def fastest(regime: Regime, variant: Variant, scale: Scale) -> dict[str, float]:
    """`outcome` with the best number of GPUs for the trainer, in eighths, found by descent from the middle."""
    if variant.in_turns or regime.gpus == 1:
        return outcome(regime, dataclasses.replace(variant, in_turns=True), 0, scale)
    shares = sorted({max(1, round(regime.gpus * part / 8)) for part in range(1, 8)} - {regime.gpus})
    tried = cache(lambda place: outcome(regime, variant, shares[place], scale))
    best = len(shares) // 2
    while True:
        near = [place for place in (best - 1, best + 1) if 0 <= place < len(shares)]
        better = min(near, key=lambda place: tried(place)["seconds"], default=best)
        if tried(better)["seconds"] >= tried(best)["seconds"]:
            return tried(best)
        best = better


VARIANTS = {
    "sync groups": Variant(GROUP, 0, 0, in_turns=True),
    "sync singles": Variant(1, 0, 0, in_turns=True),
    "prefetch": Variant(GROUP, 1, 1),
    "stream groups": Variant(GROUP, 2, 4),
    "stream singles": Variant(1, 2, 4),
}


def regimes(rates: Rates) -> dict[str, Regime]:
    """What is simulated. Rollouts per step grow with the GPUs, more slowly than they do."""

    def faster(**by: float) -> Rates:
        return dataclasses.replace(rates, **{name: getattr(rates, name) * factor for name, factor in by.items()})

    def reasoning(gpus: int, rollouts: int) -> Regime:
        return Regime(4_000, 1.0, gpus=gpus, rollouts=rollouts, rates=rates)

    return {
        "even, short": Regime(500, 0.2, rates=rates),
        "even, short, 2,048 rollouts": Regime(500, 0.2, rollouts=2_048, rates=rates),
        "spread 0.5": Regime(4_000, 0.5, rates=rates),
        "reasoning (spread 1)": reasoning(8, 512),
        "long tail (spread 2)": Regime(4_000, 2.0, rates=rates),
        "tools": Regime(2_000, 1.0, tools=True, rates=rates),
        "short with tools": Regime(500, 0.5, tools=True, rates=rates),
        "training 4x dearer": Regime(4_000, 1.0, rates=faster(training=4.0)),
        "training 4x cheaper": Regime(4_000, 1.0, rates=faster(training=0.25)),
        "reasoning, 2,048 rollouts": reasoning(8, 2_048),
        "1 GPU": reasoning(1, 64),
        "2 GPUs": reasoning(2, 128),
        "4 GPUs": reasoning(4, 256),
        "64 GPUs": reasoning(64, 1_024),
        "512 GPUs": reasoning(512, 2_048),
    }


PACES = [(1, 1), (2, 2), (3, 2), (4, 1), (4, 2), (4, 3), (4, 4), (8, 2), (8, 4), (8, 8)]
PACED = ("reasoning (spread 1)", "long tail (spread 2)", "tools", "training 4x dearer")


def plot(variants: dict[str, dict[str, Any]], paces: dict[str, dict[str, Any]]) -> None:
    """Seconds per step of each regime, and staleness against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12.0, 4.6))
    for index, name in enumerate(list(VARIANTS)[1:]):
        times = [of_regime[name]["relative"] for of_regime in variants.values()]
        left.plot(times, range(len(times)), label=name, color=LIGHT[index], marker="os^D"[index], linestyle="none")
    left.axvline(1.0, color="#808080", linewidth=1.0)
    left.set_yticks(range(len(variants)), list(variants))
    left.invert_yaxis()
    left.set_title("Seconds per step / sync groups", fontsize=11, loc="left")
    left.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.4, -0.08), ncol=4)
    for index, (name, found) in enumerate(paces.items()):
        times = [each["relative"] for each in found.values()]
        right.plot(range(len(times)), times, label=name, color=LIGHT[index], marker="os^D"[index], linestyle="none")
    right.set_xticks(range(len(PACES)), [f"{staleness}/{batches}" for staleness, batches in PACES])
    right.set_ylim(bottom=0.0)
    right.set_title("Stream singles / sync groups", fontsize=11, loc="left")
    right.set_xlabel("max_staleness / batches_in_flight (= mean staleness)")
    right.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for axis in (left, right):
        axis.grid(color="#d0d0d0", linewidth=0.6)
        axis.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(RESULTS / "stream_simulated.png", dpi=110, facecolor="white", bbox_inches="tight")
    plt.close(figure)


def row(name: str, found: dict[str, dict[str, float]]) -> None:
    """Print a row of Markdown: relative seconds, share of waiting, mean and largest staleness of each variant."""
    shown = (
        f"{each['relative']:.2f}, {each['waits']:.0%}, {each['staleness']:.2f}, {each['largest']:.0f}"
        for each in found.values()
    )
    print(f"| {name} | " + " | ".join(shown) + " |", flush=True)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the simulation; returns its results."""
    parser = parser_of(__doc__)
    parser.add_argument("--rate", nargs="+", default=[], metavar="NAME=VALUE", help="in place of those of `Rates`")
    given = parser.parse_args(argv)
    numbers = dict(each.split("=") for each in given.rate)
    changes: dict[str, Any] = {name: type(getattr(Rates(), name))(value) for name, value in numbers.items()}
    rates = dataclasses.replace(Rates(), **changes)
    scale = Scale(2, 3) if given.quick else Scale()
    chosen = regimes(rates)
    if given.quick:
        chosen = {name: dataclasses.replace(each, gpus=min(each.gpus, 2), rollouts=16) for name, each in chosen.items()}

    def relative(names: Iterable[str], of: dict[str, Variant]) -> dict[str, dict[str, dict[str, float]]]:
        print("| | " + " | ".join(of) + " |")
        table = {}
        for name in names:
            base = fastest(chosen[name], VARIANTS["sync groups"], scale)["seconds"]
            found = {variant: fastest(chosen[name], each, scale) for variant, each in of.items()}
            table[name] = {variant: {**each, "relative": each["seconds"] / base} for variant, each in found.items()}
            row(name, table[name])
        return table

    print("Seconds per step / sync groups, share that the trainer waits, mean and largest staleness:")
    variants = relative(chosen, VARIANTS)
    paces = relative(PACED, {f"{staleness}/{batches}": Variant(1, batches, staleness) for staleness, batches in PACES})
    results = {"rates": dataclasses.asdict(rates), "variants": variants, "staleness / batches": paces}
    if not given.quick:
        save("stream_simulated", results)
        plot(variants, paces)
    return results


if __name__ == "__main__":
    main()
