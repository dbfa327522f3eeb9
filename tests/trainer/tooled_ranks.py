"""Run by `test_tool_ranks.py`, on several ranks or one: trains with tools and keeps every rank's rollouts."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from basis_rl.__main__ import leave
from tests.support.tooled import Kept, ending, few_tokens, longest_prompt, tokenizer, trainer
from tests.trainer.sharded import OnCpus

CONTEXT = 200  # of the server: the longest prompt and all turns, and no token more


class KeptOnCpus(Kept, OnCpus):
    """See `OnCpus`."""


def main(output: Path, ranks: int, model: str | None, url: str | None) -> None:
    if url is None:  # the likeliest token each time: what is drawn does not depend on who draws it
        settings = {
            "top_k": 1,
            "allow_truncated_sampling": True,
            "generation_kwargs": ending(tokenizer()),
            "max_completion_length": 64,
            "learning_rate": 1e-3,
            "max_steps": 3,
        }
    else:
        settings = {
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": url,
            "vllm_server_timeout": 60.0,
            "model_init_kwargs": {"dtype": "float32"},
            "generation_kwargs": {"allowed_token_ids": few_tokens(tokenizer())},
            "vllm_importance_sampling_correction": False,  # with it hardly a gradient is left to sync
            "learning_rate": 1e-4,  # the next turns must end, too
            "max_steps": 4,
            "max_completion_length": CONTEXT - longest_prompt(tokenizer()),
        }
    rows = 8 if url is None else 16  # so many that one of them surely has three turns
    trained = trainer(
        output / "run", "otb", cls=KeptOnCpus, model=model, per_device_train_batch_size=rows // ranks, **settings
    )
    assert trained.accelerator.num_processes == ranks
    if url is not None and trained.accelerator.process_index == 1:
        trained.max_tool_calling_iterations = 1  # so that ranks end at different turns, whatever the server draws
    trained.train()
    torch.save(
        {
            "kept": trained.kept,
            "logs": trained.state.log_history,
            "sharded": hasattr(next(trained.model.parameters()), "ds_tensor"),
            "type": str(trained.accelerator.distributed_type),
        },
        output / f"rank{trained.accelerator.process_index}.pt",
    )


if __name__ == "__main__":
    ranks, folder, *rest = sys.argv[1:]
    main(Path(folder), int(ranks), rest[0] if rest else None, rest[1] if len(rest) > 1 else None)
    leave(0)
