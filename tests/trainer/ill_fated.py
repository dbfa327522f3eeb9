"""Run by `test_faults.py` and `test_run_lock.py` on two ranks: one of them gets a signal in its fourth step.

Signal ``0``: none, and forty steps of at least a tenth of a second.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

from basis_rl.__main__ import leave
from basis_rl.trainer import BasisTrainer
from tests.support.tiny import tiny_trainer


def main(output: str, model: str, who: int, what: str) -> None:
    class IllFated(BasisTrainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == 3 and self.accelerator.process_index == who:
                print(f"{what} at {time.monotonic()}", flush=True)  # a clock that all processes share
                os.kill(os.getpid(), int(what) if what == "0" else getattr(signal, what))
            time.sleep(0.1 if what == "0" else 0.0)
            return super().training_step(*args, **kwargs)

    saving = {"steps_per_generation": 3, "save_strategy": "steps", "save_steps": 100}
    trainer = tiny_trainer(output, cls=IllFated, model=model, max_steps=40 if what == "0" else 8, **saving)
    with suppress(SystemExit):
        trainer.train(resume_from_checkpoint="auto")
    print(f"rank {trainer.accelerator.process_index} stopped at {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    leave(0)
