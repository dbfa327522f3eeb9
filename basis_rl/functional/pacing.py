"""Which rollouts of a stream a generation batch takes, so that none is ever too old and none is dropped."""

from __future__ import annotations

from collections.abc import Sequence


def most_batches_ahead(max_staleness: int, generate_every: int, accumulation: int) -> int:
    """The largest number B of generation batches that may be under way while another one is trained on.

    After batch k is taken, B batches are under way; the newest has the weights of batch k and is used at batch k + B at
    the latest, ``B * generate_every / accumulation`` optimizer steps later: ``B = max_staleness * accumulation //
    generate_every``.

    Args:
        max_staleness: optimizer steps between the weights that sampled a rollout and those that it first trains.
        generate_every: micro-batches that one generation batch serves.
        accumulation: micro-batches of an optimizer step.
    """
    return max_staleness * accumulation // generate_every


def batches_left(age: int, max_staleness: int, generate_every: int, accumulation: int, offset: int = 0) -> int:
    """How many generation batches a rollout may still let pass: 0 if it must be in the one that is taken now.

    Batch j after this one begins ``(offset + j * generate_every) // accumulation`` optimizer steps later; the result is
    the largest j for which this and `age` together are at most `max_staleness`. Negative for a rollout that is too old.

    Args:
        age: optimizer steps since the weights that sampled the rollout.
        max_staleness: as in `most_batches_ahead`; likewise `generate_every` and `accumulation`.
        offset: micro-batches of the current optimizer step that are done.
    """
    return ((max_staleness - age + 1) * accumulation - 1 - offset) // generate_every


def next_batch(ended: Sequence[int], running: Sequence[int], size: int) -> list[int] | None:
    """The rollouts of the next generation batch, as indices into `ended`; None if it has to wait.

    With ``n_d`` rollouts that may let at most d more batches pass, the later batches have room for ``d * size`` of
    them, so this one takes at least ``n_d - d * size``. It takes the oldest that have ended, and of one age what ended
    first. If the condition ``n_d <= (d + 1) * size`` holds for every d before, it holds afterwards with d - 1 in
    place of d: no rollout becomes too old.

    Args:
        ended: `batches_left` of each rollout (or group) that is ready, in the order in which they ended.
        running: of those that are under way.
        size: rollouts (or groups) of a generation batch.
    """
    if len(ended) < size:
        return None
    left = [max(0, each) for each in (*ended, *running)]
    for limit in sorted({*left}):
        due = sum(each <= limit for each in left) - limit * size
        if due > sum(each <= limit for each in left[: len(ended)]):
            return None
    return sorted(sorted(range(len(ended)), key=lambda index: left[index])[:size])
