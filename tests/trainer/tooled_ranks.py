"""Run by `test_tools.py`, on several ranks or one: trains with tools and keeps every rank's rollouts."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.served import ENGINE  # noqa: F401 (the engine that the server of the test has)
from tests.tooled import Kept, few_tokens, tokenizer, trainer
from tests.trainer.sharded import OnCpus


class KeptOnCpus(Kept, OnCpus):
    """See `OnCpus`."""


def main(output: Path, ranks: int, model: str | None, url: str | None) -> None:
    if url is None:  # the likeliest token each time: what is drawn does not depend on who draws it
        settings = {"top_k": 1, "max_steps": 3}
    else:
        settings = {
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": url,
            "vllm_server_timeout": 60.0,
            "model_init_kwargs": {"dtype": "float32"},
            "generation_kwargs": {"allowed_token_ids": few_tokens(tokenizer())},
            "max_steps": 4,
        }
    trained = trainer(
        output / "run", "otb", cls=KeptOnCpus, model=model, per_device_train_batch_size=8 // ranks, **settings
    )
    assert trained.accelerator.num_processes == ranks
    trained.train()
    torch.save(
        {
            "kept": trained.kept,
            "logs": trained.state.log_history,
            "sharded": hasattr(next(trained.model.parameters()), "ds_tensor"),
        },
        output / f"rank{trained.accelerator.process_index}.pt",
    )


if __name__ == "__main__":
    folder, ranks, *rest = sys.argv[1:]
    main(Path(folder), int(ranks), rest[0] if rest else None, rest[1] if len(rest) > 1 else None)
