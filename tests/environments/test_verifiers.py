"""The adapter of verifiers with a taskset made with verifiers' own classes."""

import sys
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import get_json_schema

pytest.importorskip("verifiers", reason="needs verifiers: `pip install verifiers`")
sys.path.insert(0, str(Path(__file__).parent))

import verifiers.v1 as vf

from basis_rl.environments.verifiers import VerifiersReward, dataset, environment
from basis_rl.rewards.workers.failures import RewardInfrastructureError

TASKSET = "own_taskset"


def calling(*arguments):
    calls = [{"type": "function", "function": {"name": "multiply_product", "arguments": each}} for each in arguments]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def answered(*texts):
    return [{"role": "tool", "name": "multiply_product", "content": text} for text in texts]


def test_tasks_are_rows():
    rows = dataset(TASKSET)
    tasks = list(vf.load_taskset(vf.taskset_config_type(TASKSET)(id=TASKSET)))
    assert rows["task"] == rows["prompt_id"] == [task.key for task in tasks]
    assert rows["answer"] == [0, 3, 6]
    assert rows[0]["prompt"] == [{"role": "user", "content": "0 * 3 ="}]
    assert [message["role"] for message in rows[1]["prompt"]] == ["system", "user"]
    assert len(dataset(TASKSET, limit=2)) == 2
    assert len(dataset(TASKSET, {"size": 5})) == 5


def test_tools_are_those_of_the_servers_and_share_the_rollouts_state():
    rows = dataset(TASKSET)
    one, other = environment(TASKSET), environment(TASKSET)
    made = sys.modules[TASKSET].Shared.made
    assert type(one) is type(other)
    told = get_json_schema(one.multiply_product)["function"]
    assert told["description"] == "Multiply two numbers."
    assert told["parameters"]["properties"]["b"] == {"type": "integer", "description": "The second one."}
    assert told["parameters"]["required"] == ["a"]
    one.reset(**rows[2])
    other.reset(**rows[1])
    assert one.multiply_product(a=2, b=3) == "6"
    assert one.multiply_product(a=2) == "2"
    assert (one.hint(), other.hint()) == ("2 calls", "0 calls")
    with pytest.raises(Exception, match="Too large"):
        other.multiply_product(a=2, b=3)
    with pytest.raises(Exception, match="valid integer"):
        one.multiply_product(a="x")
    one.reset(**rows[2])
    assert one.hint() == "0 calls"
    assert sys.modules[TASKSET].Shared.made == made == 1


def test_the_reward_is_verifiers_own():
    rows = dataset(TASKSET)
    reward = VerifiersReward(TASKSET)
    played = [environment(TASKSET) for _ in range(2)]
    for each in played:
        each.reset(**rows[2])
        each.multiply_product(a=2, b=3)
    said = [calling({"a": 2, "b": 3}, {"a": 6}), *answered("6", "6"), {"role": "assistant", "content": " 6 "}]
    wrong = [{"role": "assistant", "content": "7"}]
    logged = {}
    given = {"prompts": rows[2:]["prompt"] * 2, "task": rows[2:]["task"] * 2, "log_metric": logged.__setitem__}
    assert reward(completions=[said, wrong], environments=played, **given) == [2.5, 0.0]
    assert logged == {
        f"reward/verifiers/{name}": value for name, value in (("right", 0.5), ("answered", 0.5), ("calls", 1.0))
    }
    assert reward(completions=[said, wrong], environments=played, **given) == [2.5, 0.0], "scored once more"
    assert reward(completions=[wrong, said], **given) == [0.0, 2.5], "without an environment"
    (trace,) = [played[0]._trace]
    assert [message.role for message in trace.messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert not trace.is_truncated
    reward(completions=[said, wrong], environments=played, truncated=[True, False], **given)
    assert trace.is_truncated
    assert reward([[]], [wrong], [None]) == [None], "a row of another environment"


def test_what_the_adapter_does_not_have_is_refused_or_told():
    with pytest.raises(ValueError, match="container"):
        dataset(TASKSET, {"kind": "container"})
    with pytest.raises(ValueError, match="cannot be loaded"):
        dataset("no_such_taskset")
    with pytest.raises(ValueError, match="cannot be loaded"):
        dataset(TASKSET, {"no_such_key": 1})
    with pytest.raises(ValueError, match="has no tools"):
        environment(TASKSET, {"kind": "sandbox"})
    with pytest.raises(ValueError, match=r"Env\.run"):
        dataset("openenv", {"env": "some"})
    config = {"kind": "sandbox", "size": 1}
    rows = dataset(TASKSET, config)
    reward = VerifiersReward(TASKSET, config)
    given = {"prompts": rows["prompt"], "completions": [[{"role": "assistant", "content": "1"}]], "task": rows["task"]}
    assert [reward(**given) for _ in range(5)] == [[None]] * 5
    with pytest.raises(RewardInfrastructureError, match="sandbox"):
        reward(**given)
