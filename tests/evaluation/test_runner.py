"""An evaluation from prompts to scores with planted answers: what is kept, resumed, refused, scored and compared."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from basis_rl.engine import Completion, Sampling
from basis_rl.evaluation.benchmarks import Benchmark, Problems
from basis_rl.evaluation.rollouts import GradedRollout, RolloutFile, read_rollouts
from basis_rl.evaluation.runner import Evaluation
from basis_rl.evaluation.scores import compare, score, table
from basis_rl.functional.passk import bootstrap_interval, majority_at_k, pass_at_k
from tests.support.tiny import tiny_tokenizer

N = 4
# What a model says to six problems, four times each; the gold of each is "5".
SAID = [
    [r"\boxed{5}"] * 4,
    [r"\boxed{5}", r"\boxed{5.0}", r"\boxed{6}", r"\boxed{6}"],
    [r"\boxed{6}", r"\boxed{6.0}", r"\boxed{6}", "no box"],
    ["no box"] * 4,
    [r"\boxed{\frac{10}{2}}", r"\boxed{x}", r"\boxed{y}", r"\boxed{z}"],
    [r"\boxed{1}", r"\boxed{2}", r"\boxed{3}", r"\boxed{5}"],
]
RIGHT = torch.tensor([4, 2, 0, 0, 1, 1])


def problems():
    levels = ["easy"] * 4 + ["hard"] * 2
    rows = [{"prompt": f"p{i}", "solution": "5", "prompt_id": f"id{i}", "level": name} for i, name in enumerate(levels)]
    return Problems("planted", Benchmark({}), Dataset.from_list(rows))


def evaluation(folder: Path, **settings):
    sampling = Sampling(16, temperature=settings.pop("temperature", 1.0))
    n = settings.pop("num_rollouts", N)
    prompts = list(problems().dataset["prompt"])
    tokens = tiny_tokenizer()(prompts)["input_ids"]
    return Evaluation(problems(), tokens, prompts, sampling, n, folder, {"model": "m", **settings})


def say(prompts, keys, sampling, num_rollouts):
    """The planted answers, the last problem first; the second answer to each is cut off."""
    for index in reversed(range(len(prompts))):
        texts = SAID[int(keys[index].removeprefix("id"))]
        yield index, [Completion(text, [7] * (k + 1), k == 1) for k, text in enumerate(texts)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory, reward):
    """An evaluation that has run: its folder and its result."""
    folder = tmp_path_factory.mktemp("ran")
    return folder, evaluation(folder).run(say, reward)


def test_every_answer_is_kept_with_what_was_found_in_it(ran):
    folder, _ = ran
    lines = [json.loads(line) for line in (folder / "planted.jsonl").read_text().splitlines()]
    assert len(lines) == 24
    row = next(r for r in lines if r["prompt_id"] == "id1" and r["rollout"] == 1)
    kept = GradedRollout("id1", 1, "easy", "p1", r"\boxed{5.0}", "5.0", "5", 1.0, True, 2, 1.0, "right")
    assert row == vars(kept)
    assert {row["verdict"] for row in lines if not row["reward"]} == {"unequal", "no box", "unfinished"}
    settings = json.loads((folder / "planted.settings.json").read_text())
    assert settings["model"] == "m"
    assert settings["temperature"] == 1.0
    assert settings["repetition_penalty"] == 1.0


def test_scores_are_those_of_the_estimators(ran):
    _, result = ran
    shares = RIGHT / N
    low, high = bootstrap_interval(shares)
    assert result["avg@4"] == {"value": pytest.approx(float(shares.mean())), "low": low, "high": high}
    for k in (1, 2, 4):
        assert result["pass@k"][str(k)]["value"] == pytest.approx(float(pass_at_k(N, RIGHT, k).mean()))
    votes = torch.tensor([[0] * 4, [0, 0, 1, 1], [0, 0, 0, -1], [-1] * 4, [0, 1, 2, 3], [0, 1, 2, 3]])
    correct = torch.zeros(6, 4)
    correct[0], correct[1, :2], correct[4, 0], correct[5, 3] = 1, 1, 1, 1
    assert set(result["maj@k"]) == {"2", "4"}
    for k in (2, 4):
        assert result["maj@k"][str(k)]["value"] == pytest.approx(float(majority_at_k(votes, correct, k).mean()))
    assert result["truncated"] == 1 / 4
    assert result["no_answer"] == 5 / 24
    assert result["mean_tokens"] == 2.5
    assert result["levels"]["hard"]["num_problems"] == 2
    assert result["levels"]["hard"]["avg@4"]["value"] == 1 / 4
    interval = f"{100 * low:.1f} to {100 * high:.1f}"
    shown = table({"planted": result})
    assert f"| planted | 6 | avg@4 33.3 | {interval} | @4 " in shown
    assert "| 25.0 | 20.8 | 2 | T 1, top-p 1" in shown
    # By Math-Verify alone: none of these rows is graded otherwise.
    assert result["plain"] == result["avg@4"]
    assert "at most 16 tokens | 33.3 |" in shown
    assert "planted by level: easy: 37.5 of 4, hard: 25.0 of 2." in shown


class Killed(BaseException):
    pass


def test_what_was_answered_before_a_kill_is_not_asked_again(tmp_path, reward):
    def dies(prompts, keys, sampling, num_rollouts):
        for answered, result in enumerate(say(prompts, keys, sampling, num_rollouts)):
            if answered == 3:
                raise Killed
            yield result

    with pytest.raises(Killed):
        evaluation(tmp_path / "killed").run(dies, reward)
    path = tmp_path / "killed" / "planted.jsonl"
    with path.open("a") as file:  # the problem that was being written
        file.write("".join(path.read_text().splitlines(True)[:2]).replace("id5", "id0") + '{"prompt_id": "id0", "sam')
    asked = []

    def goes_on(prompts, keys, sampling, num_rollouts):
        asked.extend(keys)
        return say(prompts, keys, sampling, num_rollouts)

    assert not evaluation(tmp_path / "killed").is_complete()
    again = evaluation(tmp_path / "killed").run(goes_on, reward)
    whole = evaluation(tmp_path / "whole").run(say, reward)
    assert asked == ["id0", "id1", "id2"]
    assert evaluation(tmp_path / "killed").is_complete()
    assert {**again, "seconds": None, "date": None} == {**whole, "seconds": None, "date": None}
    assert read_rollouts(path) == read_rollouts(tmp_path / "whole" / "planted.jsonl")


def test_answers_of_other_settings_are_left_alone(ran):
    folder, _ = ran
    before = (folder / "planted.jsonl").read_text()
    with pytest.raises(ValueError, match=r"model: \"m\", now \"other\"; temperature: 1.0, now 0.5"):
        evaluation(folder, model="other", temperature=0.5)
    assert (folder / "planted.jsonl").read_text() == before


def answers(rewards):
    return {
        f"id{p}": [GradedRollout(f"id{p}", k, None, "p", "c", "a", "g", r, False, 1) for k, r in enumerate(row)]
        for p, row in enumerate(rewards)
    }


def test_models_are_compared_problem_by_problem():
    before = answers([[0.0, 0.0], [1.0, 0.0], [0.0, None], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    after = answers([[1.0], [1.0], [1.0], [1.0], [1.0], [1.0]])
    swapped = {key: after[key] for key in reversed(after)} | answers([[0.0]])
    first = compare(answers([[0.0], [1.0]] * 6), dict(reversed(answers([[0.0], [1.0]] * 6).items())))
    assert (first.difference, first.low, first.high) == (0.0, 0.0, 0.0), "problem by problem, in whatever order"
    assert compare(before, swapped).difference == pytest.approx(5 / 6 - 3 / 12)
    shuffled = {key: after[key] for key in reversed(after)}
    result = compare(before, shuffled)
    assert result.difference == pytest.approx(1 - 3 / 12)
    assert result.p_value == 2 / 2**6
    with pytest.raises(AssertionError, match="the problems are not the same"):
        compare(before, {key: after[key] for key in list(after)[:5]})


@pytest.mark.parametrize(("n", "ks"), [(6, [1, 2, 4, 6]), (7, [1, 2, 4, 7]), (8, [1, 2, 4, 8]), (1, [1])])
def test_k_are_the_powers_of_two_and_the_number_of_rollouts(n, ks):
    right = torch.tensor([0, 1, 2]).clamp(max=n)
    result = score(answers([[1.0] * int(c) + [0.0] * (n - int(c)) for c in right]), lambda pairs: [True] * len(pairs))
    assert list(map(int, result["pass@k"])) == ks
    assert list(map(int, result.get("maj@k", {}))) == [k for k in ks if n > 1 and k > 1]
    for k in ks:
        assert result["pass@k"][str(k)]["value"] == pytest.approx(float(pass_at_k(n, right, k).mean()))


def test_math_verify_s_own_number_stands_beside_ours(tmp_path, reward):
    """Where the two differ: there is no box, or a thousand is spaced."""

    def say(prompts, keys, sampling, num_rollouts):
        for index in range(len(prompts)):
            yield index, [Completion(text, [7], False) for text in ("It is 5.", r"\boxed{5}")]

    result = evaluation(tmp_path, num_rollouts=2).run(say, reward)
    assert (result["avg@2"]["value"], result["plain"]["value"]) == (0.5, 1.0)
    header, _, row = table({"planted": result}).splitlines()[:3]
    assert header.split("|")[-2].strip() == "Math-Verify alone"
    assert row.split("|")[-2].strip() == "100.0"


def test_what_could_not_be_graded_is_wrong_and_counted():
    result = score(answers([[1.0, None], [None, 0.0]]), lambda pairs: [False] * len(pairs))
    assert result["avg@2"]["value"] == 1 / 4
    assert result["unscored"] == 1 / 2


def test_a_reward_that_gives_more_than_the_full_score_has_to_declare_its_range(tmp_path):
    def points(completions, **_):
        return [10.0 * ("5" in text) + 1 for text in completions]

    with pytest.raises(ValueError, match="reward_range"):
        evaluation(tmp_path / "a").run(say, points)
    points.reward_range = (1, 11)
    evaluation(tmp_path / "b").run(say, points)
    rows = [json.loads(line) for line in (tmp_path / "b" / "planted.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [float("5" in row["completion"]) for row in rows]


def test_of_two_lines_of_one_rollout_the_first_counts(tmp_path):
    file = RolloutFile(tmp_path, "twice", {})
    file.resume([], 1)
    for k, text in ((1, "b"), (0, "a"), (1, "c")):
        file.append([GradedRollout("id", k, None, "p", text, "1", "1", 1.0, False, 3)])
    assert [row.completion for row in file.read()["id"]] == ["a", "b"]
    assert file.resume(["id", "other"], 2).keys() == {"id"}
    assert file.resume(["id"], 3) == {} == file.read()


def test_one_process_at_a_time_evaluates_into_a_file(tmp_path):
    one, other = RolloutFile(tmp_path / "new", "n", {}), RolloutFile(tmp_path / "new", "n", {})
    with one.locked(), pytest.raises(ValueError, match="Another process is writing"), other.locked():
        pass
    with other.locked():
        pass


def test_text_with_line_separators_comes_back(tmp_path):
    text = "a\u2028b\x85c\nd \\boxed{1} é \ud800"
    file = RolloutFile(tmp_path, "odd", {})
    file.resume([], 1)
    file.append([GradedRollout("id", 0, None, text, text, "1", "1", 1.0, False, 3)])
    assert file.read()["id"][0].completion == text
