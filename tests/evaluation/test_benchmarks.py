"""The benchmarks on real rows: found, loaded, and every gold right against itself and as a model would write it."""

import json

import pytest
from datasets import Dataset

from basis_rl.data import DataArguments
from basis_rl.evaluation.benchmarks import BENCHMARKS, Problems, checked, find_benchmark, load_benchmark, load_own

# Benchmark, file, problems, and how many there are of a level.
FILES = {
    "aime24": ("aime24.jsonl", 30, {}),
    "aime25": ("aime25.jsonl", 30, {}),
    "amc23": ("amc23.jsonl", 40, {}),
    "math500": ("math500.jsonl", 500, {"5": 134}),
    "minerva": ("minerva_math.jsonl", 272, {}),
    "olympiadbench": ("olympiadbench.jsonl", 675, {"Geometry": 129}),
    "gsm8k": ("gsm8k_test.jsonl", 1319, {}),
}


def load(item, conversational=True, limit=None, **settings):
    return load_benchmark(item, DataArguments(**settings), conversational=conversational, limit=limit)


def right(reward, golds, answers):
    return reward(prompts=[], completions=[rf"So \boxed{{{a}}}" for a in answers], solution=golds)


LARGE = ("math500", "minerva", "olympiadbench", "gsm8k")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in LARGE)) for n in FILES])
def test_all_golds_of_the_benchmarks_verify(name, reward, shared_data):
    file, size, levels = FILES[name]
    problems = load(f"{name}={shared_data / file}")
    golds = problems.dataset["solution"]
    assert len(set(problems.dataset["prompt_id"])) == len(golds) == size
    assert checked(problems, reward, "error") is problems
    assert right(reward, list(golds), list(golds)) == [1.0] * size
    for level, count in levels.items():
        assert list(problems.dataset["level"]).count(level) == count
    # The same file under a name of its own: the golds need no registered benchmark.
    own = load(str(shared_data / file)).dataset
    assert own["prompt_id"] == problems.dataset["prompt_id"]
    assert right(reward, list(own["solution"]), list(golds)).count(1.0) >= size - (name == "minerva")


# Two rows of math_train.json have the empty text for an answer (two more have null, which on_missing_gold leaves out).
TRAINING = {"gsm8k_train.jsonl": [], "math_train.json": ["", ""]}


@pytest.mark.parametrize("every", [50, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("file", TRAINING)
def test_golds_of_the_training_sets_verify_but_for_those_that_are_empty(file, every, reward, shared_data):
    problems = load(str(shared_data / file), on_missing_gold="drop")
    golds = [gold for i, gold in enumerate(problems.dataset["solution"]) if i % every == 0 or not gold]
    assert len(golds) >= len(problems.dataset) // every > 140
    assert [golds[i] for i in reward.check_golds(golds)] == TRAINING[file]


def test_the_registry_asks_the_hub_and_finds_gold_and_level(monkeypatch):
    row = {"question": "P", "context": "C", "answer": "33", "final_answer": ["3", "4"], "level": 2, "subfield": "A"}
    asked = {}

    def load_dataset(*args, split):
        asked[name] = (args, split)
        return Dataset.from_list([row])

    monkeypatch.setattr("basis_rl.data.prompts.load_dataset", load_dataset)
    loaded = {}
    for name in BENCHMARKS:
        loaded[name] = load(name, conversational=False, prompt_template="{prompt}").dataset[0]
    assert asked["olympiadbench"] == (("Hothan/OlympiadBench", "OE_TO_maths_en_COMP"), "train")
    assert asked["math500"] == (("HuggingFaceH4/MATH-500", None), "test")
    assert (loaded["math500"]["prompt"], loaded["math500"]["solution"], loaded["math500"]["level"]) == ("P", "33", "2")
    olympiad = loaded["olympiadbench"]
    assert (olympiad["prompt"], olympiad["solution"], olympiad["level"]) == ("C\n\nP", "3, 4", "A")
    assert all((b.temperature == 0) == (b.num_rollouts == 1) for b in BENCHMARKS.values())


def test_names_and_sources():
    assert find_benchmark("some/where/my.parquet")[0] == "my"
    assert find_benchmark("sums=reasoning_gym:chain_sum")[1].data == {"dataset_name": "reasoning_gym:chain_sum"}
    aime = find_benchmark("aime24=mine.json")[1]
    assert (aime.num_rollouts, aime.data) == (32, {"dataset_name": "mine.json"})


def test_the_template_is_that_of_the_evaluation_and_the_id_is_not(shared_data):
    item = f"amc23={shared_data / 'amc23.jsonl'}"
    chat, plain = load(item, limit=3), load(item, conversational=False, limit=3, prompt_template="Q: {prompt}\nA:")
    assert len(chat.dataset["prompt_id"]) == 3
    assert chat.dataset["prompt_id"] == plain.dataset["prompt_id"]
    assert plain.dataset[0]["prompt"].startswith("Q: Cities")
    assert chat.dataset[0]["prompt"][0]["content"].endswith("within \\boxed{}.")


def test_levels_of_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([{"problem": f"p{i}", "answer": i, "difficulty": float(i % 3)} for i in range(6)]))
    assert list(load(str(path)).dataset["level"]) == ["0", "1", "2"] * 2


def test_a_gold_that_cannot_be_right_is_named(reward):
    rows = [{"prompt": "p", "solution": s, "prompt_id": s, "level": None} for s in ("1", "")]
    problems = Problems("mine", BENCHMARKS["math500"], Dataset.from_list(rows))
    with pytest.raises(ValueError, match=r"mine: 1 of 2 golds .*\n  row 1: ''"):
        checked(problems, reward, "error")
    assert checked(problems, reward, "drop").dataset["solution"] == ["1"]


def test_the_split_to_evaluate_on_is_not_limited_as_training_is(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) + "\n" for i in range(5)))
    for split, limit, size in (("test", None, 5), ("test", 3, 3), (None, None, 2)):
        data = DataArguments(str(path), dataset_test_split=split, max_train_samples=2)
        assert len(load_own(data, conversational=False, limit=limit, reads=("solution",)).dataset) == size
