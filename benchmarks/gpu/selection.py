"""Prompt samplers in training, groups that are drawn again, and a choice among 100,000 prompts next to a busy GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.runs import build_trainer, free, logged, model_on, shape_on, train
from benchmarks.gpu.stage import Findings
from benchmarks.selection_cost import measure
from benchmarks.trainers import tokenizer


def sampled(found: Findings, name: str, baseline: str, **settings: Any) -> list[list[str]]:
    """Train shortly with a prompt sampler; returns the prompts of each batch."""
    model = model_on(found.device, shape_on(found), tokenizer())
    trainer = build_trainer(
        baseline, model, found.folder / "selection", found.device, prompt_sampler=name,
        max_completion_length=32 if found.cuda else 8, max_steps=4, num_generations=2, **settings,
    )  # fmt: skip
    prompts: list[list[str]] = []
    inner = trainer._advantages

    def noted(inputs: Any, output: Any) -> Any:
        prompts.append([row["prompt_id"] for row in inputs])
        return inner(inputs, output)

    trainer._advantages = noted
    seconds = train(found, trainer)
    metrics = {key: logged(trainer, key) for row in trainer.state.log_history for key in row if "sampler/" in key}
    found.figure(f"{name} with {baseline}", {"seconds": seconds, **metrics})
    found.check(f"{name}: four batches of whole groups", [len(set(ids)) for ids in prompts] == [8] * 4, f"{prompts}")
    found.check(f"{name}: it says what it drew", bool(metrics))
    del trainer, model
    free()
    return prompts


def frontier(found: Findings) -> None:
    """A sampler that weights prompts, twice."""
    first, second = (sampled(found, "frontier", "basis_history") for _ in range(2))
    found.check("frontier: the first draw depends on the seed alone", first[0] == second[0])


def dynamic(found: Findings) -> None:
    """A sampler that draws groups again."""
    sampled(found, "dynamic", "rloo")


def draw(found: Findings) -> None:
    """What a draw costs."""
    size = 100_000 if found.cuda else 2_000
    found.figure(f"a draw of 512 among {size:,} prompts: milliseconds", measure(size, (512, 1), 5))


def run(found: Findings) -> None:
    """Run all parts; an error in one does not stop the others."""
    for part in (frontier, dynamic, draw):
        found.attempt(part.__name__, part, found)
