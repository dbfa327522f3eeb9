"""ValueTable: values, storage, and the runs that it refuses."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

from basis_rl.engine import Sampling
from basis_rl.types import RunContext
from basis_rl.values import ValueTable
from basis_rl.values.provenance import (
    fingerprint,
    mismatches,
    model_revision,
    reward_code,
    run_provenance,
)

REWARDS = {"a": [0.0, 1.0, 1.0, 1.0], "b": [0.0, 0.0], "c": [1.0]}


def context(prompts=None, **provenance):
    return RunContext(prompts=prompts or {"a": "fa", "b": "fb"}, provenance=provenance)


def test_smoothing_is_jeffreys_at_one_half():
    table = ValueTable.from_rewards(REWARDS)
    infinity = torch.tensor([torch.inf])
    values, variances = table.tilt(["b", "a", "c"], smoothing=0.5)(infinity)
    assert values[0].tolist() == pytest.approx([0.5 / 3, 3.5 / 5, 1.5 / 2])
    assert variances[0].tolist() == pytest.approx([v * (1 - v) for v in values[0].tolist()])
    assert table.tilt(["b", "a", "c"])(infinity)[0][0].tolist() == pytest.approx([0.0, 0.75, 1.0])


def test_graded_rewards_take_the_same_pseudo_rollouts():
    binary = ValueTable.from_rewards(REWARDS)
    graded = ValueTable.from_rewards({**REWARDS, "d": [0.5]})
    betas = torch.tensor([0.05, 0.7, 5.0])
    for smoothing in (0.0, 0.5, 2.0):
        expected = binary.tilt(["a", "b", "c"], smoothing)(betas)
        torch.testing.assert_close(graded.tilt(["a", "b", "c"], smoothing)(betas), expected)


def test_save_and_load(tmp_path):
    known = {"fingerprints": {"a": "fa"}, "provenance": {"model": "m", "temperature": 1.0}}
    table = ValueTable.from_rewards({**REWARDS, "d": [0.25, 0.5]}, **known)
    folder = table.save(tmp_path / "table")
    loaded = ValueTable.load(folder)
    assert loaded.prompt_ids == table.prompt_ids
    assert [loaded.rewards(p) for p in "abcd"] == [table.rewards(p) for p in "abcd"]
    assert loaded.provenance == table.provenance
    assert loaded.fingerprints == {"a": "fa"}
    assert loaded.reward_range == (0.0, 1.0)
    table.save(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table"]


def test_saving_never_replaces_something_else(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    with pytest.raises(ValueError, match="is not a value table; it is left alone"):
        ValueTable.from_rewards(REWARDS).save(tmp_path / "precious")
    assert (tmp_path / "precious" / "file").read_text() == "x"


@pytest.mark.parametrize(
    ("rewards", "span", "message"),
    [
        ({}, None, "at least one prompt"),
        ({"a": []}, None, "no scored rollout"),
        ({"a": [2.0]}, (0.0, 1.0), "must hold all rewards"),
        ({"a": [1.0]}, (1.0, 1.0), "must hold all rewards"),
        ({"a": [-0.5]}, (0.0, 1.0), "must hold all rewards"),
        ({"a": [0.5]}, (1.0, 0.0), "must hold all rewards"),
    ],
)
def test_impossible_tables(rewards, span, message):
    with pytest.raises(ValueError, match=message):
        ValueTable.from_rewards(rewards, reward_range=span)


def test_a_prompt_that_is_not_in_the_table():
    with pytest.raises(ValueError, match=r"1 of 2 training prompts are not in the value table .* prompt_id 'z'"):
        ValueTable.from_rewards(REWARDS).check(context({"a": "", "z": ""}))
    table = ValueTable.from_rewards(REWARDS)
    for look_up in (lambda: table.tilt(["a", "z"]), lambda: table.rewards("z")):
        with pytest.raises(ValueError, match="prompt_id 'z' is not in the value table"):
            look_up()


@pytest.mark.parametrize(
    ("key", "ours", "run"),
    [
        ("model", "Qwen/A", "Qwen/B"),
        ("revision", "1", "2"),
        ("chat_template", "t1", "t2"),
        ("reward", "f[1]", "f[2]"),
        ("temperature", 1.0, 0.7),
    ],
)
def test_contradictions_name_both_sides(key, ours, run):
    table = ValueTable.from_rewards(REWARDS, provenance={"model": "x", key: ours})
    asked = context(**{"model": "x", key: run})
    with pytest.raises(ValueError, match=re.escape(f"{key}: table {json.dumps(ours)}, run {json.dumps(run)}")):
        table.check(asked)
    table.check(asked, accept_mismatch=True)


def test_what_one_side_does_not_know_is_no_contradiction():
    table = ValueTable.from_rewards(REWARDS, provenance={"model": "m", "date": "today"})
    table.check(context(temperature=1.0))
    assert mismatches({"revision": "1", "model": "a"}, {"revision": "1", "model": "b"}) == []
    told = mismatches({"revision": "1", "model": "a"}, {"revision": "2", "model": "b"})
    assert any('"a"' in line and '"b"' in line for line in told), "of another model both names are told"
    assert mismatches({"reward": None, "top_k": 3}, {"reward": "f", "top_k": None, "min_p": 0.1}) == []


def test_prompts_rendered_otherwise():
    table = ValueTable.from_rewards(REWARDS, fingerprints={"a": "other", "b": "fb"})
    with pytest.raises(ValueError, match=r"1 prompts are rendered otherwise .* prompt_id 'a': table other, run fa"):
        table.check(context())
    ValueTable.from_rewards(REWARDS, fingerprints={"a": "fa", "b": "fb"}).check(context())
    # With another template each prompt is rendered otherwise, which says nothing more.
    table = ValueTable.from_rewards(REWARDS, fingerprints={"a": "other"}, provenance={"chat_template": "t1"})
    with pytest.raises(ValueError, match="chat_template: table") as raised:
        table.check(context(chat_template="t2"))
    assert "rendered otherwise" not in str(raised.value)


def test_the_card_keeps_its_columns_and_leaves_out_what_is_not_so(tmp_path):
    known = {"model": "a|b", "reward": "f|g[1]", "sampler": "x|y", "early_exit": 0, "num_rollouts": 4, "seed": 0}

    def card(**changes):
        table = ValueTable.from_rewards(REWARDS, provenance={**known, "rollouts": 7, "truncated": 2, **changes})
        return table.card("o/n")

    text = card()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows)
    assert {"| Model | a\\|b |", "| Reward | f\\|g[1] |", "| Completions that were cut off | 2 (28.6%) |"} <= set(rows)
    assert "Early exit" not in text
    assert "off by 0.625 (p^3 (1 - p) - (1 - p)^3 p)" in card(num_rollouts=8, early_exit=3)
    assert "license" not in text.split("---\n")[1]
    assert "base_model: owner/name" in card(model="owner/name")
    assert "base_model" not in card(model=str(tmp_path / "secret" / "m"))
    assert "secret" not in card(model=str(tmp_path / "secret" / "m"))


def test_loading_what_is_not_a_table(tmp_path):
    with pytest.raises(ValueError, match="no value table at 'owner/name'"):
        ValueTable.load("owner/name")
    folder = ValueTable.from_rewards(REWARDS).save(tmp_path / "t")
    metadata = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(json.dumps({**metadata, "format": 99}))
    with pytest.raises(ValueError, match="newer basis-rl"):
        ValueTable.load(folder)


def test_the_range_holds_all_rewards_and_is_0_to_1_where_it_can_be():
    def found(*rewards):
        return ValueTable.from_rewards({"a": list(rewards)}).reward_range

    assert found(0.0, 1.0) == found(0.2, 0.9) == found(1.0) == (0.0, 1.0)
    assert found(0.0, 2.0) == (0.0, 2.0)
    assert found(-1.0, 0.5) == (-1.0, 0.5)
    assert found(3.0, 3.0) == (3.0, 4.0)


def test_means_and_values_are_on_the_scale_of_the_range(tmp_path):
    """Those of a table whose rewards are in another unit are the same, after a trip to the disk too."""
    rewards = {"a": [0.0, 0.5, 1.0], "b": [0.25, 1.0]}
    plain = ValueTable.from_rewards(rewards, reward_range=(0.0, 2.0))
    scaled = ValueTable.from_rewards({p: [4 * r - 3 for r in rs] for p, rs in rewards.items()}, reward_range=(-3, 5))
    loaded = ValueTable.load(scaled.save(tmp_path / "t"))
    assert loaded.reward_range == (-3, 5)
    betas = torch.tensor([0.3, 2.0, torch.inf])
    for table in (scaled, loaded):
        torch.testing.assert_close(table.means, plain.means)
        torch.testing.assert_close(table.tilt(["b", "a"], 0.5)(betas), plain.tilt(["b", "a"], 0.5)(betas))
    values = plain.tilt(["a", "b"], 0.5)(torch.tensor([torch.inf]))[0][0]
    assert values.tolist() == pytest.approx([(0.5 + 0.75) / 4, (0.5 + 0.625) / 3])


def test_one_reward_at_an_end_of_the_range_makes_no_table_of_successes():
    table = ValueTable.from_rewards({"a": [0.0, 0.5, 0.5], "b": [0.25, 1.0]})
    values, variances = table.tilt(["a"])(torch.tensor([0.5]))
    weights = [1.0, math.exp(1.0), math.exp(1.0)]  # e^(r / beta)
    mean = 0.5 * (weights[1] + weights[2]) / sum(weights)
    assert float(values) == pytest.approx(mean)
    assert float(variances) == pytest.approx(0.25 * (weights[1] + weights[2]) / sum(weights) - mean**2)


def test_the_digest_is_that_of_ids_rewards_and_range(tmp_path):
    table = ValueTable.from_rewards(REWARDS)
    turned = ValueTable.from_rewards(dict(reversed(REWARDS.items())), provenance={"model": "m"})
    assert ValueTable.load(table.save(tmp_path / "t")).digest == turned.digest == table.digest
    changed = {**REWARDS, "a": [1.0 - r for r in REWARDS["a"]]}
    others = [
        ValueTable.from_rewards(changed),
        ValueTable.from_rewards(REWARDS, reward_range=(0.0, 2.0)),
        ValueTable.from_rewards({f"{p}x": rs for p, rs in REWARDS.items()}),
    ]
    assert len({table.digest, *(other.digest for other in others)}) == 4


def test_the_revision_is_that_of_all_of_a_large_file_that_is_read(tmp_path):
    """Its name, its size, and a MiB at each end; a Hub model has its commit, a folder without weights nothing."""
    assert model_revision("owner/name", "abc") == "abc"
    assert model_revision(str(tmp_path)) is None
    large = bytes(3 << 20)
    path = tmp_path / "model.safetensors"
    seen = set()
    for content in (large, large + b"0", b"1" + large[1:], large[:-1] + b"1"):
        path.write_bytes(content)
        seen.add(model_revision(str(tmp_path)))
    path.rename(tmp_path / "other.safetensors")
    assert len({*seen, model_revision(str(tmp_path))}) == 5


def test_what_identifies_a_run(tiny_path):
    def reward(): ...

    settings = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5}
    sampling = Sampling(9, **settings, generation_kwargs={"b": 1, "a": 2})
    config = SimpleNamespace(_name_or_path="owner/name", _commit_hash="c0ffee")
    tokenizer = SimpleNamespace(chat_template="a template")
    assert run_provenance(config, tokenizer, [reward], sampling, [0.5]) == {
        "model": "owner/name",
        "revision": "c0ffee",
        "chat_template": fingerprint("a template"),
        "reward": "0.5*reward",
        "reward_code": reward_code([reward]),
        "max_completion_length": 9,
        **settings,
        "generation_kwargs": '{"a": 2, "b": 1}',
    }
    bare = run_provenance(SimpleNamespace(), SimpleNamespace(), [reward], Sampling(9))
    assert not {"model", "revision", "chat_template"} & set(bare)
    assert mismatches(bare, {"min_p": 0.125}) == ["min_p: table 0.0, run 0.125"]
