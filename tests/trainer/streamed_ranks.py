"""Called by `test_stream_ranks.py`, on several ranks or one: trains on a stream and returns what each rank saw."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from basis_rl.run import errors
from basis_rl.trainer import conversation
from tests.support import tooled
from tests.support.served import trainer
from tests.support.tiny import Keeps, parity_reward
from tests.trainer.sharded import OnCpus
from tests.trainer.test_tool_ranks import KeptOnCpus

# Groups of 4 over 12 rows: on two ranks the middle one has two rows on each.
ROWS, GROUP = 12, 4
# One batch ahead, which has the prompts of one block; every importance weight is cut to 1, whatever was sampled when.
STREAM = {
    "rollouts": "stream",
    "max_staleness": 1,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 1.0,
    "max_steps": 4,
}


class Kept(Keeps, OnCpus):
    """Keeps every global batch, this rank's advantages and rollouts, and the state of the sampler."""

    def _streamed_rows(self, streamed):
        rows = super()._streamed_rows(streamed)
        self.taken = [asdict(each) for each in self._served]
        return rows

    def noted(self, inputs, output, local):
        return {"batch": vars(self._pending.newest), "advantages": local.clone().cpu(), "rollouts": self.taken}


class Stopped(Kept):
    """The first rank alone gets a signal while it waits for the third batch."""

    def _streamed_rows(self, streamed):
        if self._generation_batch == 2 and self.accelerator.is_main_process:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        return super()._streamed_rows(streamed)


def raising(completions, completion_ids, trainer_state, **kwargs):
    """Raises an exception once two steps are taken."""
    if trainer_state.global_step >= 2:
        raise KeyError("gone")
    return parity_reward(completions, completion_ids)


RUNS = {
    "groups": ("rloo", Kept, {"num_generations": GROUP, "optim": "sgd", "learning_rate": 1.0}),
    "frontier": ("basis", Kept, {"num_generations": 1, "prompt_sampler": "frontier"}),
    "reward": ("rloo", Kept, {"num_generations": GROUP, "reward_funcs": raising}),
    "lost": ("rloo", Kept, {"num_generations": GROUP, "vllm_recovery_timeout": 3.0}),
    "signal": ("rloo", Stopped, {"num_generations": GROUP}),
}


def with_tools(output: Path, model: Path, url: str, ranks: int):
    conversation.read_turn = tooled.by_rule
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 60.0}
    own = {"model_init_kwargs": {"dtype": "float32"}, "learning_rate": 1e-4, "max_completion_length": 60}
    allowed = {"generation_kwargs": {"allowed_token_ids": tooled.few_tokens(tooled.tokenizer())}}
    size = {"per_device_train_batch_size": ROWS // ranks, "num_generations": GROUP}
    given = {**STREAM, **server, **own, **allowed, **size}
    return tooled.trainer(output, "otb", cls=KeptOnCpus, model=model, **given)


def main(output: Path, model: Path, url: str, ranks: int, name: str, resumed: str | None = None) -> dict[str, Any]:
    if name == "tools":
        trained = with_tools(output / name, model, url, ranks)
    else:
        baseline, cls, own = RUNS[name]
        size = {"per_device_train_batch_size": ROWS // ranks, "save_strategy": "steps", "save_steps": 2}
        given = {"reward_funcs": parity_reward, "save_only_model": False, **STREAM, **size, **own}
        trained = trainer(output / name, model, url, baseline, cls, **given)
    assert trained.accelerator.num_processes == ranks
    raised = ""
    try:
        trained.train(resume_from_checkpoint=resumed)
    except (errors.RewardFailed, errors.ServerLost, SystemExit) as error:
        raised = f"{type(error).__name__}: {error}"
    if not raised:
        trained.save_model(str(output / name / "saved"))
    parameter = next(trained.model.parameters())
    return {
        "kept": trained.kept,
        "raised": raised,
        "stopped": trained.stop_on_signal.stopped,
        "step": trained.state.global_step,
        "logs": trained.state.log_history,
        "selection": None if trained.selection is None else trained.selection.state_dict(),
        "recoveries": trained.vllm_generation.recoveries,
        "sharded": hasattr(parameter, "ds_tensor") or hasattr(parameter, "full_tensor"),
        "talks": hasattr(trained.vllm_generation, "vllm_client"),
    }
