"""ReasoningGymReward: the score is reasoning-gym's own, whatever the model writes."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from basis_rl.data import DataArguments, load_prompts
from basis_rl.rewards import FunctionError, ReasoningGymReward, gym
from basis_rl.rewards.golds import invalid_golds

reasoning_gym = pytest.importorskip("reasoning_gym")
SCORER = Path(gym.__file__).with_name("gym_scorer.py")
# decimal_arithmetic's scorer reads its configuration, spiral_matrix's evals the answer, rearc's needs tuples.
SETS = {"knights_knaves": {"n_people": 3}, "decimal_arithmetic": {}, "spiral_matrix": {}, "rearc": {}}


@pytest.fixture(scope="module")
def reward():
    reward = ReasoningGymReward(num_workers=1, answer_in="tag", timeout=1.5)
    yield reward
    reward.close()


def loaded(name, **kwargs):
    data = DataArguments(dataset_name=f"reasoning_gym:{name}", dataset_kwargs={"seed": 5, "size": 4, **kwargs})
    return load_prompts(data, conversational=False)


def tagged(answers):
    return [f"<think>hm</think><answer>{answer}</answer>" for answer in answers]


@pytest.mark.parametrize("name", SETS)
def test_scores_are_those_of_the_set_itself(reward, name):
    dataset = loaded(name, **SETS[name])
    original = reasoning_gym.create_dataset(name, seed=5, size=4, **SETS[name])
    answers = [[entry["answer"], entry["answer"][:-1], "rubbish", ""][i] for i, entry in enumerate(original)]
    expected = [original.score_answer(answer, entry) for answer, entry in zip(answers, original, strict=True)]
    # The scorer of rearc gives 0.05 for an empty text, which is no answer here.
    expected[3] = 0.0
    assert expected[0] == 1.0
    assert reward([], tagged(answers), reasoning_gym=dataset["reasoning_gym"]) == pytest.approx(expected)
    assert reward([], tagged(list(dataset["solution"])), reasoning_gym=dataset["reasoning_gym"]) == [1.0] * 4


def test_a_mixture_of_sets(reward):
    dataset = loaded("composite", size=8, datasets=[{"name": "chain_sum"}, {"name": "knights_knaves", "weight": 2}])
    assert reward([], tagged(list(dataset["solution"])), reasoning_gym=dataset["reasoning_gym"]) == [1.0] * 8


def test_an_entry_that_somebody_has_saved(reward):
    entry = dict(reasoning_gym.create_dataset("chain_sum", seed=1, size=1)[0])
    cell = {"dataset": "chain_sum", "entry": entry}
    cells = [cell, json.dumps(cell), cell]
    assert reward([], tagged([entry["answer"], entry["answer"], "no"]), reasoning_gym=cells)[:2] == [1.0, 1.0]


def test_hostile_answers_do_no_harm(reward, tmp_path):
    mark = tmp_path / "mark"
    write = f"[open({str(mark)!r}, 'w').write('x')] or 1"
    for name, hostile in (
        ("spiral_matrix", [write, "['a'*10**11]", "[" * 10_000, "exit()"]),
        ("countdown", [write, "9**9**9**9", "(" * 10_000, "exit()"]),
    ):
        row = loaded(name, size=1)[0]
        logged = {}
        scores = reward([], tagged([answer for h in hostile for answer in (h, row["solution"])]),
                        reasoning_gym=[row["reasoning_gym"]] * 8, log_metric=logged.__setitem__)  # fmt: skip
        assert scores[1::2] == [1.0] * 4
        assert all(score is None or score < 0.1 for score in scores[0::2])
        assert not mark.exists()


def test_no_scorer_runs_the_answer():
    """All sets whose code could: an answer that is run could make itself, and all after it, right."""
    probe = f"""
import importlib.util, json, re, sys, sysconfig
from pathlib import Path
spec = importlib.util.spec_from_file_location("scorer", {str(SCORER)!r})
scorer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scorer)
from reasoning_gym.factory import DATASETS
def could(cls):
    return re.search(r"eval\\(|parse_expr|sympify", Path(sys.modules[cls.__module__].__file__).read_text())
names = [name for name, (cls, _) in DATASETS.items() if could(cls)]
sys.ran = []
for name in names:
    for answer in ("[__import__('sys').ran.append(1)]", "__import__('sys').ran.append(1)", "x.__class__"):
        scorer.gym_score(answer, json.dumps({{"dataset": name, "index": 0, "config": {{"seed": 1, "size": 1}}}}))
print(json.dumps([names, sys.ran]))
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    names, ran = json.loads(done.stdout.splitlines()[-1])
    assert {"spiral_matrix", "n_queens", "countdown", "simple_integration"} <= set(names)
    assert ran == []


def test_without_an_answer_and_with_a_threshold(reward):
    row = loaded("chain_sum", size=1)[0]
    binary = copy.copy(reward)  # whose worker has done its imports
    binary.answer_in, binary.threshold = "box", 1.0
    texts = [rf"\boxed{{{row['solution']}}}", rf"\boxed{{about {row['solution']}}}", row["solution"]]
    logged = {}
    assert binary([], texts, reasoning_gym=[row["reasoning_gym"]] * 3, log_metric=logged.__setitem__) == [1.0, 0.0, 0.0]
    assert logged["reward/reasoning_gym/no_answer"] == pytest.approx(1 / 3)


def test_scores_beyond_the_range_are_brought_into_it(reward, monkeypatch):
    monkeypatch.setattr(reward._calls, "run", lambda calls, log: [float(args[0]) for args, _ in calls])
    assert reward([], tagged(["1.5", "-0.5", "0.5"]), reasoning_gym=["{}"] * 3) == [1.0, 0.0, 0.5]


@pytest.mark.parametrize("name", ["coin_flip", "game_of_life_halting"])
def test_a_set_that_pays_for_a_constant_is_refused(reward, name):
    dataset = loaded(name, size=8)
    with pytest.raises(ValueError, match=f"'{name}' pays (1.00|0.[6-9].) on average for '.*Leave '{name}' out"):
        invalid_golds(reward, dataset)
    mixed = loaded("composite", size=16, datasets=[{"name": "isomorphic_strings"}, {"name": name}])
    with pytest.raises(ValueError, match=f"'{name}' pays"):
        invalid_golds(reward, mixed)


@pytest.mark.parametrize("name", ["isomorphic_strings", "course_schedule", "knights_knaves", "acre", "gcd"])
def test_a_constant_that_is_the_gold_now_and_then_is_no_reason(reward, name, caplog):
    """The base rate of a question with two answers is one half."""
    assert invalid_golds(reward, loaded(name, size=8)) == []
    assert caplog.text == ""


def test_a_scorer_is_judged_by_what_it_pays_where_the_constant_is_not_the_gold(reward, monkeypatch, caplog):
    paid = {}
    monkeypatch.setattr(reward._calls, "run", lambda calls, log=None: [paid.get(args[0], 0.0) for args, _ in calls])
    cells = [json.dumps({"dataset": "mine", "entry": {"question": "?", "answer": gold}}) for gold in "0123456789"]
    golds = ["1.0", "Yes", "no", 3, "2", "1", "yes", "no", "no", "no"]
    for paid, said in (({"1": 1.0, "yes": 1.0}, "yes"), ({"B": 0.6}, "B"), ({"B": 0.3}, None), ({"B": 0.1}, None)):
        caplog.clear()
        if said is None:
            assert reward.check_golds(cells, golds) == []
            assert ("pays 0.30 on average for 'B'" in caplog.text) is (paid["B"] > 1 / 6)
        else:
            with pytest.raises(ValueError, match=f"for '{said}'"):
                reward.check_golds(cells, golds)
    # Of too few entries it could be chance.
    paid = {"B": 1.0}
    assert reward.check_golds(cells[:2], golds[:2]) == []
    assert reward.check_golds([None, "", 3], golds[:3]) == []


def test_data_of_another_version_are_noticed(reward):
    row = loaded("chain_sum", size=1)[0]
    cell = {**json.loads(row["reasoning_gym"]), "index": 0, "question_sha256": "0" * 16}
    cell.pop("entry", None)
    with pytest.raises(FunctionError, match="another version of reasoning-gym"):
        reward([], tagged(["1"]), reasoning_gym=[cell])
