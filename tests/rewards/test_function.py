"""FunctionReward: somebody's function hangs, crashes, raises or eats memory, and the trainer does not."""

import os
import time

import pytest

from basis_rl.rewards import FunctionError, FunctionReward
from basis_rl.rewards.base import required_columns
from basis_rl.rewards.workers import pool
from basis_rl.rewards.workers.failures import RewardInfrastructureError

HERE = "tests.rewards.user_functions"


@pytest.fixture(scope="module")
def moody():
    # By the clock ten times what a call may compute, which a busy machine must give it by then. To fill the memory
    # takes about a quarter of that.
    reward = FunctionReward(f"{HERE}:moody", num_workers=2, timeout=0.3, wall_timeout=3.0, memory_bytes=1 << 25)
    yield reward
    reward.close()


def test_it_is_given_its_columns_only_and_runs_in_another_process():
    reward = FunctionReward(f"{HERE}:right", num_workers=1)
    assert required_columns(reward) == {"solution"}
    assert reward.__name__ == "right"
    columns = {"solution": ["a", "b", "none"], "date": [object()] * 3}  # what it does not ask for need not be JSON
    talk = [{"role": "assistant", "content": "is a"}]
    assert reward(prompts=["p"] * 3, completions=["an a", talk, "x"], **columns) == [1.0, 0.0, None]
    assert reward(prompts=["p"], completions=["b"], solution=["b"], bonus=[0.5]) == [1.5]
    reward.close()
    where = FunctionReward(f"{HERE}:process", num_workers=1)
    assert where(prompts=[], completions=[""]) != [float(os.getpid())]
    where.close()
    everything = FunctionReward(f"{HERE}.length", num_workers=1)  # has **row
    assert required_columns(everything) == set()
    given = {"solution": ["x"], "level": [3], "trainer_state": object()}
    assert everything(prompts=["p"], completions=["four"], **given) == [4.0]
    everything.close()


def test_hanging_eating_and_dying_calls_do_not_spoil_the_others(moody):
    kinds = ["hang", "fine", "sleep", "fine", "eat", "fine", "die", "fine", "print", "fine"]
    logged = {}
    began = time.perf_counter()
    scores = moody(prompts=[], completions=kinds, log_metric=logged.__setitem__)
    assert time.perf_counter() - began < 60
    # Of what ran out of time or memory nothing is known: that is no wrong answer.
    expected = {"fine": 1.0, "hang": None, "sleep": None, "eat": None, "die": None, "print": 1.0}
    assert scores == [expected[kind] for kind in kinds]
    shares = {"timeout": 0.2, "memory": 0.1, "infrastructure": 0.1, "error": 0.0}
    assert logged == {f"reward/moody/{kind}": share for kind, share in shares.items()}


def test_what_a_limit_scores_is_the_users_choice_and_too_many_calls_whose_process_dies_end_the_run():
    reward = FunctionReward(f"{HERE}:moody", num_workers=2, timeout=0.5, over_limit=-1)
    assert reward(prompts=[], completions=["hang", "fine"]) == [-1, 1.0]
    with pytest.raises(RewardInfrastructureError, match=r"moody' could not score 6 of the last 9 .*\(crashed\)"):
        reward(prompts=[], completions=["die"] * 6 + ["fine"])
    reward.close()


def test_a_bug_ends_the_run_with_its_traceback():
    reward = FunctionReward(f"{HERE}:buggy", num_workers=1)
    with pytest.raises(
        FunctionError, match=r"(?s)buggy' failed on 1 of 2.*line \d+, in buggy.*KeyError: 'no such weight'"
    ):
        reward(prompts=["", ""], completions=["bug", "fine"])
    for kind in ("text", "nan", "list"):
        with pytest.raises(FunctionError, match="not a finite number or None"):
            reward(prompts=[""], completions=[kind])
    assert reward(prompts=[""], completions=["fine"]) == [0.25]
    reward.close()


def test_bugs_can_be_left_unscored_unless_everything_fails():
    reward = FunctionReward(f"{HERE}:buggy", num_workers=1, on_error="unscored")
    logged = {}
    assert reward(prompts=["", ""], completions=["bug", "fine"], log_metric=logged.__setitem__) == [None, 0.25]
    assert logged["reward/buggy/error"] == 0.5
    with pytest.raises(FunctionError, match="failed on 2 of 2"):
        reward(prompts=["", ""], completions=["bug", "nan"])
    reward.close()


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (f"{HERE}:absent", {}, "cannot be imported:\n(?s:.*)has no attribute 'absent'"),
        ("no_such_module:f", {}, "cannot be imported:\n(?s:.*)No module named 'no_such_module'"),
        (f"{HERE}:nothing", {}, "must be a plain function whose first parameter"),
        ("f", {}, "named `module:function`"),
        (f"{HERE}:judged", {"env": ["NOT_SET_HERE"]}, "NOT_SET_HERE is not set. Export it"),
        (f"{HERE}:judged", {"env": ["MY_KEY=sk-1"]}, r"^((?!sk-1).)*never their values.$"),
        (f"{HERE}:judged", {"arguments": {"scael": 1}}, "'tests.*judged' has no parameter 'scael', only .*scale"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(name, given, message):
    with pytest.raises(ValueError, match=message):
        FunctionReward(name, num_workers=given.pop("num_workers", 1), **given)


def test_the_version_is_that_of_the_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    versions = []
    for text in ("return 1.0", "return 1.0 - 1.0"):
        (tmp_path / "mine.py").write_text(f"def f(completion):\n    {text}\n")
        reward = FunctionReward("mine:f", num_workers=1)
        versions.append((reward.version, reward(prompts=[], completions=[""])[0]))
        reward.close()
    assert versions[0][0] != versions[1][0]
    assert [score for _, score in versions] == [1.0, 0.0]


def test_workers_have_the_variables_that_are_named_and_no_message_has_their_values(monkeypatch, caplog):
    key, url = "sk-not-to-be-seen-42", "http://judge.example/v1"
    for name, value in {"MY_KEY": key, "MY_URL": url, "HTTPS_PROXY": "http://me:word@proxy:3128"}.items():
        monkeypatch.setenv(name, value)
    given = {"num_workers": 1, "arguments": {"scale": 2.0, "kind": "kind"}}
    reward = FunctionReward(f"{HERE}:judged", env=["MY_KEY", "MY_URL"], **given)
    assert "HTTPS_PROXY is not in `env`" in caplog.text
    assert required_columns(reward) == {"solution"}
    assert "scale" not in reward.reads
    assert reward(prompts=["p"], completions=["x"], solution=["abc"], kind=["of a column"]) == [2 * len(key) + 1 + 3]
    with pytest.raises(FunctionError, match="no answer to <MY_KEY> at <MY_URL>"):
        reward(prompts=["p"], completions=["tell"], solution=["abc"])
    versions = {reward.version}
    reward.close()
    # Without its variables it fails, as before they could be named; the arguments belong to the version.
    bare = FunctionReward(f"{HERE}:judged", **{**given, "arguments": {"scale": 1}}, env=["HTTPS_PROXY"])
    with pytest.raises(FunctionError, match="KeyError: 'MY_KEY'"):
        bare(prompts=["p"], completions=["x"], solution=["abc"])
    bare.close()
    assert len({bare.version, *versions}) == 2
    assert not any(value in f"{versions} {caplog.text}" for value in (key, url, "word"))


def test_a_worker_that_hangs_is_said_while_it_is_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(pool, "_SILENCE", 0.5)
    reward = FunctionReward(f"{HERE}:moody", num_workers=2, timeout=60.0, wall_timeout=4.0)
    assert reward(prompts=[], completions=["fine", "sleep", "fine"]) == [1.0, None, 1.0]
    assert "moody': no call has ended for 0 s; 2 of 3 have, and one may take up to 4 s." in caplog.text
    reward.close()
