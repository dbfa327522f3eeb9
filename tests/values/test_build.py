"""Building a table: the rewards of the training reward on the reference model's rollouts, whatever ends it early."""

import itertools
import math
import random
import tempfile
from pathlib import Path

import pytest

from basis_rl.engine import Sampling, ServersLost, prompt_tokens
from basis_rl.engine.client import request_seed
from basis_rl.values import ValueTable, build, provenance
from basis_rl.values.build import TablePlan
from basis_rl.values.provenance import fingerprint
from basis_rl.values.shards import Record, Shards
from basis_rl.values.sources import ModelSource, ServerSource
from tests.support.fake_vllm import FakeServer, completion
from tests.support.tiny import parity_reward, sums, tiny_model, tiny_tokenizer

SAMPLING = Sampling(max_new_tokens=6)


def length_reward(completions, log_metric, trainer_state, **kwargs):
    """Longer answers score higher; conversations as in training."""
    return [None if not c[0]["content"] else min(1.0, len(c[0]["content"]) / 20) for c in completions]


def mostly_even(completions, completion_ids, **kwargs):
    """1 for three of four completions: early exits on one side are common, and on the other rare."""
    return [float(sum(ids) % 4 > 0) for ids in completion_ids]


def model_source(batch_size=7):
    tokenizer = tiny_tokenizer()
    return ModelSource(tiny_model(tokenizer), tokenizer, batch_size)


def server_source(url, **settings):
    tokenizer = tiny_tokenizer()
    return ServerSource([url], tiny_model(tokenizer).config, tokenizer, **settings)


def plan(n=6, **changes):
    settings = {"dataset": sums(n), "reward_funcs": [parity_reward], "sampling": SAMPLING, "num_rollouts": 5}
    return TablePlan(**{**settings, **changes})


def build_table(source, asked, folder=None, shard=(0, 1)):
    """The table; without a folder for what is finished, in one that is gone afterwards."""
    with tempfile.TemporaryDirectory() as temporary:
        return build.build_table(source, asked, folder or Path(temporary) / "table", shard)


def rewards(table):
    return {prompt_id: table.rewards(prompt_id) for prompt_id in table.prompt_ids}


def test_rewards_provenance_and_fingerprints(tmp_path):
    settings = {"reward_funcs": [parity_reward, length_reward], "reward_weights": [1.0, 0.5]}
    table = build_table(model_source(), plan(sampling=Sampling(6, repetition_penalty=1.1), **settings))
    dataset = sums(6)
    assert table.prompt_ids == dataset["prompt_id"]
    for prompt_id in table.prompt_ids:
        assert len(table.rewards(prompt_id)) == 5
        assert all(0 <= reward <= 1.5 for reward in table.rewards(prompt_id))
    assert table.reward_range[1] > 1.0
    assert table.provenance["reward"] == "1*parity_reward + 0.5*length_reward"
    assert table.provenance["max_completion_length"] == 6
    assert table.provenance["repetition_penalty"] == 1.1
    assert table.provenance["rollouts"] == 30
    assert 30 <= table.provenance["tokens"] <= 180
    text = tiny_tokenizer().apply_chat_template(dataset[0]["prompt"], add_generation_prompt=True, tokenize=False)
    assert table.fingerprints[dataset[0]["prompt_id"]] == fingerprint(text)
    assert ValueTable.load(table.save(tmp_path / "t")).provenance == table.provenance


def test_a_servers_rollouts_are_scored_as_they_are():
    """Against a plain loop over prompts and seeds."""
    asked = plan(9, num_rollouts=4, seed=3)
    with FakeServer() as fake:
        table = build_table(server_source(fake.url), asked)
    for row in asked.dataset:
        prompt = prompt_tokens(row["prompt"], tiny_tokenizer(), {})
        seed = request_seed(3, 0, row["prompt_id"])
        drawn = [completion(prompt, seed + k, SAMPLING.max_new_tokens)["token_ids"] for k in range(4)]
        assert table.rewards(row["prompt_id"]) == [float(sum(ids) % 2) for ids in drawn]
    assert table.provenance["sampler"] == "vllm"


def test_prompts_that_cannot_be_scored_are_left_out_and_counted(capsys):
    def picky(prompts, completions, solution, **kwargs):
        return [None if s == "5" else 1.0 for s in solution]

    table = build_table(model_source(), plan(reward_funcs=[picky], num_rollouts=2))
    assert len(table) == 5
    assert "1 of 6 prompts are left out" in capsys.readouterr().out


def test_a_rollout_without_one_of_its_scores_has_the_others_and_one_without_any_none():
    def first(completion_ids, **kwargs):
        return [None if sum(ids) % 3 == 0 else 1.0 for ids in completion_ids]

    def second(completion_ids, **kwargs):
        return [None if sum(ids) % 2 == 0 else 3.0 for ids in completion_ids]

    sums_of_tokens = []

    def noted(completion_ids, **kwargs):
        sums_of_tokens.extend(sum(ids) for ids in completion_ids)
        return [None] * len(completion_ids)

    settings = {"reward_funcs": [first, second, noted], "reward_weights": [2.0, 1.0, 5.0]}
    table = build_table(model_source(), plan(12, num_rollouts=4, **settings))
    expected = [2.0 * (s % 3 != 0) + 3.0 * (s % 2 != 0) for s in sums_of_tokens if s % 6]
    assert sorted(r for p in table.prompt_ids for r in table.rewards(p)) == sorted(expected)
    assert len(expected) < len(sums_of_tokens) == 48, "some have no score at all"


@pytest.mark.parametrize("conversational", [True, False])
def test_rewards_are_called_as_in_training(conversational):
    seen = {}

    def spy(**given):
        seen.update(given)
        return [0.0 if i % 2 else 1.0 for i, _ in enumerate(given["completions"])]

    dataset = sums(3) if conversational else sums(3).map(lambda row: {"prompt": row["prompt"][0]["content"]})
    table = build_table(model_source(100), plan(3, dataset=dataset, reward_funcs=[spy], num_rollouts=2))
    assert sorted(seen["solution"]) == ["1", "1", "3", "3", "5", "5"]
    completion = seen["completions"][0]
    assert (completion[0]["role"] == "assistant") if conversational else isinstance(completion, str)
    assert {"prompts", "completion_ids", "trainer_state", "log_extra", "log_metric", "prompt_id"} <= set(seen)
    assert table.provenance["tokens"] >= sum(len(ids) for ids in seen["completion_ids"])
    truncated = sum(len(ids) == SAMPLING.max_new_tokens for ids in seen["completion_ids"])
    assert table.provenance["truncated"] >= truncated > 0


def test_a_setting_that_the_template_does_not_read_makes_no_other_build(tmp_path):
    build_table(model_source(), plan(), tmp_path / "t", (0, 2))
    asked = plan(chat_template_kwargs={"enable_thinking": True})
    assert build_table(model_source(), asked, tmp_path / "t", (1, 2)) is not None


def test_the_seed_and_the_golds_are_part_of_what_is_built():
    one, two = (build_table(model_source(), plan(seed=seed)) for seed in (0, 1))
    assert rewards(one) != rewards(two)
    other = sums(6).map(lambda row: {"solution": f"{row['solution']}0"})
    asked = [plan(), plan(dataset=other)]
    source = model_source()
    identities = [each.identity(source.config, source.tokenizer, source.name)["dataset"] for each in asked]
    assert identities[0] != identities[1]


class Killed(BaseException):
    """Ends a build at a place of our choosing, as a kill would."""


def dying(after):
    """A reward that is the end of the process at its `after`-th call."""
    calls = itertools.count(1)

    def parity_reward(completions, completion_ids, **kwargs):
        if next(calls) > after:
            raise Killed
        return [float(sum(ids) % 2) for ids in completion_ids]

    return parity_reward


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_a_build_that_is_killed_and_resumed_is_the_undisturbed_one(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_SCORED_TOGETHER", 4)  # or all answers may come at once, and no death between
    monkeypatch.setattr(provenance, "code_identity", lambda reward: "the same")  # a reward that dies is other code
    with FakeServer() as fake:

        def source():
            return model_source() if kind == "transformers" else server_source(fake.url)

        whole = build_table(source(), plan(12))
        deaths = 0
        for after in (1, 2, 1, 3):
            try:
                build_table(source(), plan(12, reward_funcs=[dying(after)]), tmp_path / "t.partial")
            except Killed:
                deaths += 1
            (file,) = (tmp_path / "t.partial").glob("shard-*.jsonl")
            lines = file.read_bytes()
            file.write_bytes(lines[: len(lines) - random.Random(after).randrange(40)])  # and the last line torn
        assert deaths >= (2 if kind == "transformers" else 1)
        asked = len(fake.requests)
        table = build_table(source(), plan(12), tmp_path / "t.partial")
        assert rewards(table) == rewards(whole)
        assert {**table.provenance, "date": None} == {**whole.provenance, "date": None}
        assert build_table(source(), plan(12, reward_funcs=[dying(0)]), tmp_path / "t.partial") is not None
        assert len(fake.requests) - asked < 12, "what was finished is not asked for again"


def test_a_prompt_without_its_second_part_is_not_finished(tmp_path):
    asked = plan(2, early_exit=2)
    certain, open_ = asked.ids
    shards = Shards(tmp_path, {"seed": 0})
    with shards.writer() as writer:
        writer(Record(certain, 0, [1.0, 1.0], 2, 0).line())
        writer(Record(open_, 0, [1.0, 0.0], 2, 0).line())
    prints = dict.fromkeys(asked.ids, "x")
    assert build.merge_shards(asked, shards, prints) is None
    with shards.writer() as writer:
        writer(Record(open_, 1, [0.0, 1.0, 1.0], 3, 0).line())
    assert rewards(build.merge_shards(asked, shards, prints)) == {certain: [1.0, 1.0], open_: [1.0, 0.0, 0.0, 1.0, 1.0]}


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
@pytest.mark.parametrize("early_exit", [0, 2])
def test_parts_make_the_same_table_in_any_order(kind, early_exit, tmp_path):
    asked = plan(11, early_exit=early_exit, reward_funcs=[mostly_even])
    with FakeServer() as fake:

        def source():
            return model_source() if kind == "transformers" else server_source(fake.url)

        whole = build_table(source(), asked)
        for part in (2, 0):
            assert build_table(source(), asked, tmp_path / "t", (part, 3)) is None
        table = build_table(source(), asked, tmp_path / "t", (1, 3))
        assert rewards(table) == rewards(whole)
        assert len(list((tmp_path / "t").glob("shard-*-of-00003.jsonl"))) == 3
        # Another number of parts, or one process for what is left, does as well.
        assert build_table(source(), asked, tmp_path / "u", (1, 2)) is None
        assert rewards(build_table(source(), asked, tmp_path / "u")) == rewards(whole)


def test_early_exit_saves_what_is_certain_and_changes_nothing_else():
    with FakeServer() as fake:
        source = server_source(fake.url)
        first = build_table(source, plan(40, reward_funcs=[mostly_even], num_rollouts=3))
        fake.requests.clear()
        table = build_table(source, plan(40, reward_funcs=[mostly_even], num_rollouts=8, early_exit=3))
    certain = [p for p in first.prompt_ids if len(set(first.rewards(p))) == 1]
    assert 5 < len(certain) < 35
    for prompt_id in table.prompt_ids:
        assert table.rewards(prompt_id)[:3] == first.rewards(prompt_id)
        assert len(table.rewards(prompt_id)) == (3 if prompt_id in certain else 8)
    assert sum(body["n"] for body in fake.requests) == table.provenance["rollouts"] == 40 * 8 - 5 * len(certain)
    assert len({body["seed"] for body in fake.requests}) == len(fake.requests)


def test_rewards_that_are_not_0_or_1_are_never_certain():
    asked = plan(2, early_exit=2)
    for drawn in ([1.0, 1.0], [0.0, 0.0], [0.5, 0.5], [0.0, 1.0], [0.0, math.nan], [math.nan, math.nan]):
        assert asked.is_certain(Record("a", 0, drawn, 0, 0)) == (drawn in ([1.0, 1.0], [0.0, 0.0]))
    assert not asked.is_certain(Record("a", 1, [1.0, 1.0], 0, 0))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.83, 1.0])
def test_the_bias_of_an_early_exit_is_as_stated(p):
    """By enumeration of all outcomes of the rollouts."""
    n, m = 7, 3
    asked = plan(2, num_rollouts=n, early_exit=m)
    value = leaves = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=n):
        chance = math.prod(p if r else 1 - p for r in outcome)
        early = asked.is_certain(Record("a", 0, list(outcome[:m]), 0, 0))
        kept = outcome[:m] if early else outcome
        value += chance * sum(kept) / len(kept)
        leaves += chance * early
    assert leaves == pytest.approx(p**m + (1 - p) ** m)
    assert value - p == pytest.approx((n - m) / n * (p**m * (1 - p) - (1 - p) ** m * p), abs=1e-12)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed: 0, now 1"),
        ({"num_rollouts": 6}, "num_rollouts: 5, now 6"),
        ({"early_exit": 2}, "early_exit: 0, now 2"),
        ({"sampling": Sampling(6, temperature=0.9)}, "temperature: 1.0, now 0.9"),
        ({"reward_funcs": [mostly_even]}, 'reward: "parity_reward", now "mostly_even"'),
        ({"dataset": sums(7)}, "dataset: "),
    ],
)
def test_another_build_is_not_resumed(changes, named, tmp_path):
    build_table(model_source(), plan(), tmp_path / "t", (0, 2))
    with pytest.raises(ValueError, match=f"begun otherwise(.|\n)*{named}(.|\n)*delete the folder"):
        build_table(model_source(), plan(**changes), tmp_path / "t", (0, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_rollouts": 0}, "at least one rollout per prompt"),
        ({"early_exit": 5}, "an early exit after fewer"),
        ({"early_exit": -1}, "an early exit after fewer"),
        ({"dataset": sums(3).select([0, 1, 0])}, "twice"),
    ],
)
def test_what_makes_no_table(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_any_prefix_of_a_shard_is_read_as_its_whole_lines(tmp_path):
    shards = Shards(tmp_path, {"seed": 0})
    records = [Record(f"id {i}", i % 2, [1.0, math.nan], 5, 1) for i in range(2)]
    with shards.writer() as writer:
        for record in records:
            writer(record.line())
        with pytest.raises(ValueError, match="Another process is writing"), shards.writer():
            pass
    (file,) = tmp_path.glob("*.jsonl")
    data = file.read_bytes()
    for cut in range(len(data) + 1):
        file.write_bytes(data[:cut])
        kept = [record.prompt_id for record in Shards(tmp_path, {"seed": 0}).records()]
        assert kept == [r.prompt_id for r in records][: len(kept)]
        whole = max(0, data[: cut + 1].count(b"\n") - 1)  # a line is whole before its newline is there
        assert len(kept) == whole
        with Shards(tmp_path, {"seed": 0}).writer() as writer:
            writer(Record("new", 0, [0.5], 1, 0).line())
        again = list(Shards(tmp_path, {"seed": 0}).records())
        assert [r.prompt_id for r in again] == [*kept, "new"]
        assert repr(again[:whole]) == repr(records[:whole])


@pytest.mark.parametrize("removed", [True, False])
def test_only_one_process_merges_and_what_two_have_done_counts_once(removed, tmp_path):
    """A process that waits for the lock gets it on a folder whose shards are gone."""
    shards = Shards(tmp_path / "t", {})
    with shards.merging() as ours:
        assert not ours, "nothing is there"
    for part in (0, 1):
        with shards.writer(part, 2) as writer:
            writer(Record("a", 0, [float(part)], 1, 0).line())
    with shards.merging() as ours:
        assert ours
        assert list(shards.records()) == [Record("a", 0, [0.0], 1, 0)]
        if removed:
            shards.remove()
        else:
            for path in (tmp_path / "t").glob("shard-*"):
                path.unlink()
    with shards.merging() as ours:
        assert not ours


def test_prompts_of_similar_length_are_drawn_together_as_many_as_fit():
    source = object.__new__(ModelSource)
    source.batch_size = 7
    prompts = [[1] * n for n in (5, 1, 4, 2, 3)]
    assert source.chunks(prompts, 3) == [[1, 3], [4, 2], [0]]
    assert source.chunks(prompts, 8) == [[1], [3], [4], [2], [0]], "a prompt has all its rollouts at once"


def test_what_was_drawn_before_servers_were_lost_is_kept(tmp_path):
    with FakeServer() as fake:
        source = server_source(fake.url)
        drawn = source.draw

        def lost(*given):
            yield from itertools.islice(drawn(*given), 5)
            raise ServersLost("none is left")

        source.draw = lost
        with pytest.raises(ServersLost):
            build_table(source, plan(9), tmp_path)
    (file,) = tmp_path.glob("shard-*.jsonl")
    assert len(file.read_text().splitlines()) == 1 + 5
