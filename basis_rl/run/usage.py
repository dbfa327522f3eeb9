"""What a run has cost so far: rollouts, their tokens, seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Usage:
    """Counts over a whole run, resumes included; all of it is in every line of the log.

    - ``num_rollouts``: rollouts that were sampled for training on all ranks, the greedy ones of `remax` included.
      Those of a value table are not in it, since one table serves many runs.
    - ``num_rollout_tokens``: their tokens. TRL's ``num_tokens`` also has the prompts' tokens, and no greedy ones.
    - ``seconds``: wall-clock time of training with its evaluations and checkpoints. Of a run that was killed, what it
      spent after the checkpoint from which it was resumed is not counted: those steps were done again.
    """

    def __init__(self) -> None:
        # The numbers of rollouts and of their tokens. One value, which the trainer puts back when it repeats a step.
        self.drawn = (0, 0)
        self._earlier = 0.0
        self._since = time.perf_counter()

    def draw(self, rollouts: int, tokens: int) -> None:
        """Count rollouts of all ranks, and their tokens."""
        self.drawn = (self.drawn[0] + rollouts, self.drawn[1] + tokens)

    @property
    def rollouts(self) -> int:
        """Rollouts so far."""
        return self.drawn[0]

    @property
    def seconds(self) -> float:
        return self._earlier + time.perf_counter() - self._since

    def metrics(self) -> dict[str, float]:
        """What goes into the log."""
        rollouts, tokens = self.drawn
        return {"num_rollouts": rollouts, "num_rollout_tokens": tokens, "seconds": round(self.seconds, 3)}

    def state_dict(self) -> dict[str, float]:
        return {"rollouts": self.drawn[0], "tokens": self.drawn[1], "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.drawn = (int(state["rollouts"]), int(state["tokens"]))
        self._earlier = float(state["seconds"])
        self._since = time.perf_counter()
