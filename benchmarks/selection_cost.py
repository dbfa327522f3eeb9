"""What does choosing the prompts of one generation batch cost, by size of the dataset?

    python -m benchmarks.selection_cost [--prompts 1000000] [--batch 512] [--rollouts 1 8] [--repeats 20] [--quick]

Measured on one core, in processor time, which other programs on the machine do not lengthen, in two parts: the draw of
each sampler (they take turns) by the belief of `basis_history` about every prompt; and by each belief what a batch of
`frontier` takes altogether: the draw, its rows of the dataset, and the belief's update. A belief that knows every
prompt learns from prompts that are all new to it; one with a prior from the text knows texts alone, and learns from the
prompts that it draws.

Results: ``benchmarks/results/selection_cost.json``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset

from basis_rl.baselines import Baseline, BasisHistory, Spo
from basis_rl.samplers import SAMPLERS, build_sampler
from basis_rl.trainer.selection import Selection
from basis_rl.types import RolloutBatch
from benchmarks.common import RESULTS, one_thread, parser_of, save, spread

BELIEFS: dict[str, Callable[[], Any]] = {
    "flat": BasisHistory,
    "gaussian": lambda: BasisHistory(belief="gaussian"),
    "text": lambda: BasisHistory(prior="text"),
    "spo": Spo,
}


def known(found: Any, prompt_ids: list[str]) -> Any:
    """The belief `found` with a different belief about each prompt, as after a long run."""
    generator, count = torch.Generator().manual_seed(0), len(prompt_ids)
    if isinstance(found, Spo):
        alpha, beta = torch.rand((2, count), generator=generator).tolist()
        found.trackers = {name: (a, b, 0.0) for name, a, b in zip(prompt_ids, alpha, beta, strict=True)}
        return found
    shape = (len(found.drifts), count)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64)
    variance = torch.rand(shape, generator=generator, dtype=torch.float64)
    table = torch.cat([mean, variance, torch.zeros((1, count), dtype=torch.float64)]).T.contiguous()
    state = {**found.state_dict(), "prompt_ids": prompt_ids, "table": table, "shift_variance": 0.1}
    found.load_state_dict(state)
    return found


def selection(data: Dataset, prompt_ids: list[str], name: str, belief: Baseline, shape: tuple[int, int]) -> Selection:
    """What `BasisTrainer` draws its prompts with."""
    batch, rollouts = shape
    length = {"max_steps": -1, "num_train_epochs": 9}
    size = {"prompts_per_batch": batch, "num_generations": rollouts, "max_generations": None}
    args: Any = SimpleNamespace(**size, **length, seed=0)
    one: Any = SimpleNamespace(process_index=0, num_processes=1)
    return Selection(build_sampler(name), belief, data, prompt_ids, args, one)


def timed(work: Callable[[], Any], times: list[float]) -> None:
    """Add the milliseconds of processor time that `work` takes."""
    began = time.process_time()
    work()
    times.append(1e3 * (time.process_time() - began))


def batch_of(prompt_ids: list[str], rollouts: int, step: int) -> RolloutBatch:
    """Rollouts of these prompts, every other one right."""
    names = [name for name in prompt_ids for _ in range(rollouts)]
    return RolloutBatch(
        rewards=(torch.arange(len(names)) % 2).float(),
        group_ids=torch.arange(len(prompt_ids)).repeat_interleave(rollouts),
        prompt_ids=names,
        action_mask=torch.ones((len(names), 1), dtype=torch.bool),
        step=step,
    )


def figures(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median, least and largest of each part of a batch, and of their sum."""
    whole = {**times, "all": [sum(parts) for parts in zip(*times.values(), strict=True)]}
    return {part: spread(ms) for part, ms in whole.items()}


def of_samplers(data: Dataset, prompt_ids: list[str], shape: tuple[int, int], repeats: int) -> dict[str, Any]:
    """What each sampler's draw takes, by a belief about every prompt."""
    belief = known(BasisHistory(), prompt_ids)
    samplers = {name: selection(data, prompt_ids, name, belief, shape) for name in SAMPLERS}
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for repeat in range(repeats):
        for name, each in samplers.items():
            timed(partial(each._draw, repeat, shape[0]), times[name])
    return {name: figures({"draw": each}) for name, each in times.items()}


def of_belief(
    name: str, data: Dataset, prompt_ids: list[str], shape: tuple[int, int], repeats: int
) -> dict[str, dict[str, float]]:
    """What one belief takes: it knows every prompt and learns new ones, or by their texts alone those that it draws."""
    belief = BELIEFS[name]()
    if name == "text":
        belief.text_prior.know(
            {key: prompt[0]["content"] for key, prompt in zip(prompt_ids, data["prompt"], strict=True)}
        )
    else:
        known(belief, prompt_ids)
    chosen = selection(data, prompt_ids, "frontier", belief, shape)
    times: dict[str, list[float]] = {"draw": [], "rows": [], "update": []}

    def draw(number: int) -> None:
        chosen._draws[number] = chosen._draw(number, shape[0])

    for repeat in range(repeats):
        timed(partial(draw, repeat), times["draw"])
        timed(partial(chosen.rows, repeat), times["rows"])
        names = [prompt_ids[row] for row in chosen._draws[repeat].rows.tolist()]
        new = names if name == "text" else [f"{repeat} {key}" for key in names]
        timed(partial(belief.update, batch_of(new, shape[1], repeat)), times["update"])
    return figures(times)


def measure(prompts: int, shape: tuple[int, int], repeats: int) -> dict[str, Any]:
    """Milliseconds of one generation batch, by sampler and by belief."""
    ids = [f"{i:016x}" for i in range(prompts)]
    said = ([{"role": "user", "content": f"What is {i} plus {7 * i % 1000}?"}] for i in range(prompts))
    data = Dataset.from_dict({"prompt": list(said), "prompt_id": ids})
    samplers = of_samplers(data, ids, shape, repeats)
    return {"samplers": samplers, "beliefs": {name: of_belief(name, data, ids, shape, repeats) for name in BELIEFS}}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    parser = parser_of(__doc__)
    sizes = [1_000, 10_000, 100_000, 1_000_000]
    parser.add_argument("--prompts", type=int, nargs="+", default=sizes, help="sizes of the dataset (1000 to 1000000)")
    parser.add_argument("--batch", type=int, default=512, help="prompts per generation batch (512)")
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1, 8], help="rollouts per prompt (1 and 8)")
    parser.add_argument("--repeats", type=int, default=20, help="batches per sampler, belief and size (20)")
    options = parser.parse_args(argv)
    if options.quick:
        options.prompts, options.repeats = [1_000], 2
    one_thread()
    found: dict[str, Any] = {}
    for rollouts in options.rollouts:
        for count in options.prompts:
            each = measure(count, (min(options.batch, count), rollouts), options.repeats)
            found.setdefault(str(rollouts), {})[str(count)] = each
            for kind, rows in each.items():
                for name, parts in rows.items():
                    medians = ", ".join(f"{part} {ms['median']:.1f}" for part, ms in parts.items())
                    print(f"{rollouts} x {count}, {kind}, {name}: {medians} ms", flush=True)
    results = {"batch": options.batch, "repeats": options.repeats, "milliseconds": found}
    save("selection_cost", results, Path(tempfile.mkdtemp()) if options.quick else RESULTS)
    return results


if __name__ == "__main__":
    main()
