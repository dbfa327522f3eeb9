"""What a Python user hands over: names, lists of rows, classes by mistake; and what such a run leaves and says."""

import json
import warnings
from pathlib import Path

import pytest
from datasets import Dataset
from trl import GRPOConfig

import basis_rl
from basis_rl import Baseline, BasisConfig, BasisTrainer
from basis_rl.baselines import Rloo
from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.function import FunctionReward
from basis_rl.rewards.overlong import OverlongReward
from basis_rl.samplers import Uniform
from basis_rl.trainer.inputs import as_baseline, as_config, as_dataset, as_rewards, as_sampler
from tests.support.tiny import config, parity_reward, sums, tiny_model, tiny_tokenizer


def test_the_names_are_at_the_top_of_the_package():
    assert {"RolloutBatch", "Advantages", "Baseline"} <= set(dir(basis_rl))
    assert basis_rl.RolloutBatch is basis_rl.types.RolloutBatch
    assert issubclass(Rloo, Baseline)
    assert all(getattr(basis_rl, name) is not None for name in basis_rl.__all__)


def test_a_run_from_python_leaves_and_says_what_the_command_does(tmp_path, capsys):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = BasisTrainer(
            model=tiny_model(),
            processing_class=tiny_tokenizer(),
            reward_funcs="math_verify",
            args=config(tmp_path, max_steps=2, disable_tqdm=True),
            train_dataset=list(sums()),
            baseline="rloo",
        )
        trainer.train()
    assert [str(each.message) for each in caught if issubclass(each.category, FutureWarning)] == []
    said = capsys.readouterr().out
    assert "step 1/2  reward " in said
    assert max(map(len, said.splitlines())) <= 80
    assert "{'" not in said, "no dictionaries of transformers'"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 1
    assert (tmp_path / "training.png").stat().st_size > 1000


def test_reward_functions_by_name(tmp_path):
    args = config(tmp_path, max_completion_length=6)
    names = ["math_verify", "overlong", "tests.support.tiny.parity_reward", "pool:tests.support.tiny:parity_reward"]
    found = as_rewards([*names, parity_reward, "owner/reward-model"], args)
    assert [type(each) for each in found[:2]] == [MathVerifyReward, OverlongReward]
    assert found[1].max_completion_length == 6
    assert found[2] is found[4] is parity_reward
    assert isinstance(found[3], FunctionReward)
    assert found[5] == "owner/reward-model"
    assert as_rewards(None, args) == []
    assert as_rewards(parity_reward, args) == [parity_reward]
    with pytest.raises(ValueError, match=r"Unknown reward function 'math_verfy'. Did you mean 'math_verify'"):
        as_rewards("math_verfy", args)


def test_rows_are_a_dataset():
    rows = [{"prompt": "1 + 1 =", "solution": "2"}, {"solution": "3", "prompt": "1 + 2 ="}]
    made = as_dataset(rows, "train_dataset")
    assert isinstance(made, Dataset)
    assert made["solution"] == ["2", "3"]
    assert as_dataset(made, "train_dataset") is made
    assert as_dataset({"a": rows}, "eval_dataset")["a"]["prompt"] == ["1 + 1 =", "1 + 2 ="]
    assert as_dataset(None, "eval_dataset") is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: as_baseline(Rloo),
            r"Rloo is a class: give Rloo\(...\), or its name 'rloo'",
        ),
        (lambda: as_baseline(3), "got a int"),
        (lambda: as_sampler(Uniform), "Uniform is a class.*'uniform'"),
        (lambda: as_rewards([MathVerifyReward], None), "MathVerifyReward is a class: give .*its name 'math_verify'"),
        (lambda: as_config(BasisConfig, "m"), "BasisConfig is a class"),
        (lambda: as_config(GRPOConfig("x", use_cpu=True, bf16=False), "m"), "must be a BasisConfig, got GRPOConfig"),
        (lambda: as_dataset("gsm8k", "train_dataset"), "is the name 'gsm8k'; load it first"),
        (lambda: as_dataset([], "train_dataset"), "must be a Dataset or a list of rows"),
        (lambda: as_dataset(["1 + 1"], "train_dataset"), "must be a Dataset or a list of rows"),
        (lambda: as_dataset([{"prompt": "a"}, {"Prompt": "b"}], "train_dataset"), "row 1 has the columns .'Prompt'."),
    ],
)
def test_what_does_not_fit_is_one_message(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_no_config_is_a_folder_named_after_the_model(monkeypatch):
    monkeypatch.setattr("basis_rl.trainer.inputs.BasisConfig", lambda folder: Path(folder))
    assert as_config(None, "owner/model/") == Path("model-BASIS")
