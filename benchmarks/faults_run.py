"""The run that `benchmarks.faults` disturbs: resumes if there is a checkpoint, tells its step, keeps its log."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.errors import ServerLost
from benchmarks.common import one_thread
from tests.support.served import trainer
from tests.trainer.test_state import RunningMean


class Told(TrainerCallback):
    """Writes the number of the last whole step where the disturber looks."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            part = Path(args.output_dir) / "step.part"
            part.write_text(str(state.global_step))
            part.rename(part.with_name("step"))


class Spoilt(BasisTrainer):
    """One step's gradient is not finite."""

    at = -1

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == self.at:
            next(p for p in self.model.parameters() if p.grad is not None).grad.view(-1)[0] = torch.nan
        return loss


def main(folder: Path, model: Path, given: dict[str, Any]) -> int:
    """Train as `given` says, in `folder`; the exit code."""
    one_thread()
    folder.mkdir(parents=True, exist_ok=True)
    served = {
        "use_vllm": given["url"] is not None,
        "vllm_request_timeout": given.get("request_timeout", 60.0),
        "vllm_recovery_timeout": given.get("recovery_timeout", 200.0),
    }
    trained = trainer(
        folder,
        model,
        given["url"],
        RunningMean(),
        Spoilt,
        num_generations=2,
        steps_per_generation=2 if given["url"] is None else 1,
        max_completion_length=48,
        max_steps=given["steps"],
        save_strategy="steps",
        save_steps=given["save_every"],
        save_total_limit=2,
        **served,
    )
    trained.at = given.get("spoil", -1)
    trained.add_callback(Told())
    (folder / f"pid{trained.accelerator.process_index}").write_text(str(os.getpid()))
    try:
        trained.train(resume_from_checkpoint="auto")
    except ServerLost:
        return 69
    if trained.stop_on_signal.stopped:
        return 75
    trained.save_model(str(folder / "final"))
    if trained.accelerator.is_main_process:
        (folder / "history.json").write_text(json.dumps(trained.state.log_history))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])))
