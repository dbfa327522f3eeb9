"""How many files and functions of the package a reader has to follow: those that a small run enters.

    python tools/trace_run.py [--baseline grpo] [--list]

Trains a tiny model for three steps on a CPU and records every function of ``basis_rl`` that is called: in the whole
run from the import on, and in one step, from the call that asks for a generation batch to the end of `_learn`.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

Entered = set[tuple[str, str]]


def profiler(entered: Entered) -> Callable[[FrameType, str, Any], None]:
    """A profile function that adds (file, qualified name) of each function of the package that is called."""

    def called(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # The bodies of classes and modules are called too, but have no fast locals.
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if event == "call" and "/basis_rl/" in code.co_filename and is_function:
            entered.add((code.co_filename.split("/basis_rl/")[-1], code.co_qualname))

    return called


def run(baseline: str, whole: Entered, step: Entered) -> None:
    """Train; `whole` gets what the run enters, `step` what its second step does."""
    record_whole, record_step = profiler(whole), profiler(step)
    threading.setprofile(record_whole)
    sys.setprofile(record_whole)
    from basis_rl.trainer import BasisTrainer
    from tests.support.tiny import config, parity_reward, sums, tiny_model, tiny_tokenizer

    class Watched(BasisTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            if self.model.training and self.state.global_step == 1:
                sys.setprofile(record_step)
            return super()._generate_and_score_completions(inputs)

        def _learn(self) -> None:
            super()._learn()
            if sys.getprofile() is record_step:
                sys.setprofile(record_whole)
                whole.update(step)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Watched(
            model=tiny_model(),
            processing_class=tiny_tokenizer(),
            reward_funcs=parity_reward,
            args=config(folder, max_steps=3, steps_per_generation=1, gradient_accumulation_steps=1),
            train_dataset=sums(),
            baseline=baseline,
        )
        trainer.train()
        trainer.save_model()
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", default="grpo")
    parser.add_argument("--list", action="store_true", help="print the functions too")
    chosen = parser.parse_args()
    whole: Entered = set()
    step: Entered = set()
    sys.path.insert(0, str(Path.cwd()))
    run(chosen.baseline, whole, step)
    for name, entered in (("one step", step), ("whole run", whole)):
        print(f"{name}: {len({file for file, _ in entered})} files, {len(entered)} functions")
        if chosen.list:
            print("\n".join(f"  {file}: {function}" for file, function in sorted(entered)))


if __name__ == "__main__":
    main()
