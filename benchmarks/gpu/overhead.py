"""What each baseline adds to a whole step with `none`, and that to a step of TRL's trainer.

Rollouts are given, not sampled, so that generation does not hide what the baselines add. What has been measured is
kept: a stage that was not done in time measures the rest when it is run again.
"""

from __future__ import annotations

from basis_rl.baselines import BASELINES
from benchmarks.gpu.runs import SMALL, TINY, build_trainer, free, model_on, now, train
from benchmarks.gpu.stage import REASON, Findings
from benchmarks.trainers import TRL, StepClock, tokenizer

MARGIN = 1.5  # a run begins only if this multiple of the longest so far is left


def whole_step(found: Findings, side: str, rollouts: int, tokens: int) -> float:
    """Seconds of a step: the faster one of the second and the third of a run."""
    model = model_on(found.device, SMALL if found.cuda else TINY, tokenizer())
    clock = StepClock(lambda: now(found))
    trainer = build_trainer(
        side, model, found.folder / "steps", found.device, given=True, max_steps=4, num_generations=4,
        per_device_train_batch_size=rollouts // 2, max_completion_length=tokens,
    )  # fmt: skip
    trainer.add_callback(clock)
    train(found, trainer)
    del trainer, model
    free()
    return min(end - begin for begin, end in zip(clock.began[1:], clock.began[2:], strict=False))


def steps(found: Findings, name: str, sides: list[str], rollouts: int, tokens: int, rounds: int) -> None:
    """Time whole steps of all sides in `rounds` rounds; a side that is missing at the end is a fault.

    Args:
        found: findings of the stage.
        name: name of this part.
        sides: `TRL` and baselines; `none` is one of them.
        rollouts: rollouts per batch.
        tokens: tokens of each.
        rounds: how often; sides alternate.
    """
    measured: dict[str, list[float]] = dict(found.figures.get(f"{name}: seconds", {}))
    longest = 0.0
    for round_ in range(rounds):
        for side in sides:
            if len(measured.get(side, [])) > round_:
                continue
            began = now(found)
            if found.left() < MARGIN * longest:
                break
            try:
                seconds = whole_step(found, side, rollouts, tokens)
            except Exception as error:  # the others are measured all the same
                found.check(f"{name}, {side}", False, f"{type(error).__name__}: {error}"[:REASON])
                free()
                continue
            measured[side] = [*measured.get(side, []), seconds]
            longest = max(longest, now(found) - began)
            found.figure(f"{name}: seconds", measured)
    least = {side: min(each) for side, each in measured.items()}
    if none := least.get("none"):
        added = {side: f"{value / none - 1:+.1%}" for side, value in least.items()}
        found.figure(f"{name}: added to `none`", added)
    per_step = rollouts * tokens
    found.figure(f"{name}: tokens per second", {side: per_step / value for side, value in least.items()})
    lacking = [side for side in sides if len(measured.get(side, [])) < rounds]
    found.check(f"{name}: every side was measured {rounds} times", not lacking, f"not {', '.join(lacking)}")


def run(found: Findings) -> None:
    """Time the steps of all baselines with 1,024 tokens, and of some with 4,096."""
    some = [TRL, "none", "grpo", "basis", "otb", "ppo"]
    every = [*some, *(name for name in BASELINES if name not in some)]
    plans: list[tuple[list[str], int, int, int]] = [(every, 16, 1024, 2), (some, 8, 4096, 2)]
    if not found.cuda:
        plans = [(every, 8, 8, 1), (some[:3], 8, 16, 1)]
    for sides, rollouts, tokens, rounds in plans:
        name = f"steps, {tokens} tokens"
        found.attempt(name, steps, found, name, sides, rollouts, tokens, rounds)
