"""A resume proves what it continues: the model before the training, the rows, the code of the rewards."""

import json
import re
import shutil
from types import FunctionType

import pytest
import torch
from peft import LoraConfig

from basis_rl.run import checkpoint
from basis_rl.values.provenance import model_revision, weights_fingerprint
from examples.quickstart.warm_start import build_model, save
from tests.support.tiny import named_baseline, parity_reward, sums, tiny_model, tiny_tokenizer, tiny_trainer

SHORT = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}


def began(folder, **given):
    tiny_trainer(folder, **SHORT, max_steps=1, **given).train()
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return began(tmp_path_factory.mktemp("first"))


@pytest.fixture
def begun(first, tmp_path):
    """A copy of the folder of a run of one step."""
    return shutil.copytree(first, tmp_path / "begun")


def resumed(folder, **given):
    trainer = tiny_trainer(folder, **SHORT, max_steps=2, **given)
    trainer.train(resume_from_checkpoint=True)
    return trainer


def said(capsys):
    lines = re.findall(r"Resumed with another setting: (.*)\.", capsys.readouterr().out)
    return [line for line in lines if not line.startswith("max_steps")]


# The model before the training.


def other_model(seed=1):
    return tiny_model(seed=seed)


def saved(folder, seed=0):
    tokenizer = tiny_tokenizer()
    save(tiny_model(tokenizer, seed), tokenizer, folder)
    return folder


def lora():
    return LoraConfig(target_modules=["q_proj"], init_lora_weights=False)


def test_another_model_that_is_not_needed_is_told_and_the_record_keeps_the_first(tmp_path, capsys):
    """Two folders of one name: their weights tell them apart."""
    first = saved(tmp_path / "first" / "model")
    second = saved(tmp_path / "second" / "model", seed=1)
    began(tmp_path / "run", model=first)
    trainer = resumed(tmp_path / "run", model=second)
    (line,) = said(capsys)
    assert re.fullmatch(r"base model: model \(weights \w+\), now model \(weights \w+\)", line)
    info = trainer.run_info()
    assert info.base_model == "model"
    assert info.base_revision == model_revision(str(first)) != model_revision(str(second))
    again = tiny_trainer(tmp_path / "run", model=second, **SHORT, max_steps=3)
    again.train(resume_from_checkpoint=True)
    assert len(said(capsys)) == 1, "the run is still one of its first model"


NEEDED = {
    "the KL": ({"beta": 0.5}, "from which the KL is measured"),
    "an adapter": ({"peft_config": lora()}, "to which the adapter is added"),
}


@pytest.mark.parametrize("case", NEEDED)
def test_another_model_that_is_needed_is_refused(case, tmp_path, capsys):
    settings, role = NEEDED[case]
    first, other = saved(tmp_path / "first"), saved(tmp_path / "other", seed=1)
    run = began(tmp_path / "run", model=first, **settings)
    with pytest.raises(ValueError, match=f"base model: .*{role}.*Set them back.*allow_changed_settings"):
        resumed(run, model=other, **settings)
    assert resumed(run, model=first.rename(tmp_path / "moved"), **settings).state.global_step == 2
    assert said(capsys) == []
    trainer = tiny_trainer(run, model=other, **SHORT, max_steps=3, allow_changed_settings=True, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert role in said(capsys)[0]


def test_a_model_of_other_shapes_is_refused_before_its_weights_are_loaded(begun):
    larger = build_model(tiny_tokenizer(), hidden_size=32, layers=1)
    with pytest.raises(ValueError, match="parameters of the model: other names or shapes"):
        resumed(begun, model=larger)


def test_a_reference_that_the_checkpoint_has_needs_no_model(tmp_path, tiny_path, capsys):
    synced = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1}
    began(tmp_path / "run", model=tiny_path, **synced)
    resumed(tmp_path / "run", model=saved(tmp_path / "other", seed=1), **synced)
    assert "base model" in said(capsys)[0]


def test_a_fingerprint_is_of_the_weights_in_any_precision():
    model = tiny_model()
    found = weights_fingerprint(model)
    assert found == weights_fingerprint(tiny_model()) != weights_fingerprint(other_model())
    assert weights_fingerprint(tiny_model().bfloat16()) == found
    for name, weight in model.named_parameters():
        kept = weight.data
        weight.data = kept * 1.01 + 1e-3
        assert weights_fingerprint(model) != found, name
        weight.data = kept
    assert weights_fingerprint(tiny_model().to("meta")) is None


def test_adapters_are_not_of_the_base_model():
    from peft import get_peft_model

    made = [get_peft_model(tiny_model(seed=seed), lora()) for seed in (0, 0, 1)]
    with torch.no_grad():
        for name, weight in made[1].named_parameters():
            if "lora" in name:
                weight.add_(1.0)
    prints = [weights_fingerprint(model) for model in made]
    assert prints[0] == prints[1] != prints[2]


# The rows.


def rows(n=16, **columns):
    found = sums(n)
    for name, cells in columns.items():
        found = found.remove_columns([name] if name in found.column_names else [])
        found = found.add_column(name, [cells(i) for i in range(n)])
    return found


def judged_by_solution(completions, completion_ids, solution, **kwargs):
    return [float((sum(ids) + len(gold)) % 2) for ids, gold in zip(completion_ids, solution, strict=True)]


@pytest.mark.parametrize("reward", [parity_reward, judged_by_solution])
def test_other_golds_are_refused_whatever_is_allowed(reward, tmp_path):
    """Also with a reward that does not say what it reads, and ids of the set's own, which stay."""
    began(tmp_path, reward_funcs=reward)
    other = rows(solution=lambda i: str(2 * i + 1 + (i == 15)))
    with pytest.raises(ValueError, match=r"other values in \['solution'\]. Resume with the same dataset"):
        resumed(tmp_path, reward_funcs=reward, train_dataset=other, allow_changed_settings=True)
    assert resumed(tmp_path, reward_funcs=reward, train_dataset=rows(solution=lambda i: str(2 * i + 1)))


def test_other_prompts_under_the_same_ids_are_refused(tmp_path, capsys):
    began(tmp_path, train_dataset=rows(80))
    other = rows(80, prompt=lambda i: [{"role": "user", "content": f"{i} + {i + 1}" + ("=" if i == 79 else " =")}])
    with pytest.raises(ValueError, match="column prompt of the dataset: other values"):
        resumed(tmp_path, train_dataset=other)
    resumed(tmp_path, train_dataset=other, allow_changed_settings=True)
    assert said(capsys) == ["column prompt of the dataset: other values"]


def test_a_column_that_no_reward_names_is_told(tmp_path, capsys):
    began(tmp_path, train_dataset=rows(note=str))
    resumed(tmp_path, train_dataset=rows(note=lambda i: f"{i}!"))
    assert said(capsys) == ["column note of the dataset, which no reward names: other values"]


# The rewards.


def twin(code, module=parity_reward.__module__):
    """A function of the same name, with other code."""
    made = FunctionType(code.__code__, code.__globals__, "parity_reward")
    made.__module__ = module
    return made


def other_body(completions, completion_ids, **kwargs):
    return [1.0 - float(sum(ids) % 2) for ids in completion_ids]


def test_a_reward_of_the_same_name_with_another_body_is_refused(begun, capsys):
    with pytest.raises(ValueError, match=r'code of the reward: "parity_reward .*Set them back'):
        resumed(begun, reward_funcs=twin(other_body))
    resumed(begun, reward_funcs=twin(other_body), allow_changed_settings=True)
    assert said(capsys)[0].startswith("code of the reward")


def test_the_same_code_in_another_module_is_told(begun, capsys):
    resumed(begun, reward_funcs=twin(parity_reward, "tests.support.ranks"))
    assert said(capsys) == ['modules of the reward: ["tests.support.tiny"], now ["tests.support.ranks"]']


@pytest.mark.parametrize("change", [{"reward_funcs": other_body}, {"reward_weights": [2.0]}])
def test_another_reward_is_refused(change, begun):
    with pytest.raises(ValueError, match='reward: "parity_reward", now'):
        resumed(begun, **change)


# Value tables.


def test_a_value_table_is_of_the_code_of_its_reward(first, tmp_path):
    def table(**known):
        baseline = named_baseline("basis", sums())
        baseline.values.provenance.update(known)
        return tiny_trainer(tmp_path, baseline)

    settings = json.loads((first / "checkpoint-1" / "run_settings.json").read_text())
    code = settings["fixed"]["code of the reward"]
    assert table(reward="parity_reward", reward_code=code)
    assert table(reward="parity_reward"), "what it does not say is not compared"
    with pytest.raises(ValueError, match='reward_code: table "parity_reward 0", run "parity_reward '):
        table(reward="parity_reward", reward_code="parity_reward 0")


def test_fewer_ranks_resume_at_the_end_of_a_generation_batch_and_are_told(tmp_path, capsys):
    """A checkpoint as two ranks write it: each has its part and its random numbers."""
    tiny_trainer(tmp_path, **SHORT, max_steps=2).train()
    (path,) = checkpoint.checkpoints(tmp_path)
    parts = torch.load(path / "phase_0.pt")
    parts["place"]["ranks"] = 2
    for rank in (0, 1):
        torch.save(parts, path / f"phase_{rank}.pt")
        (path / f"rng_state_{rank}.pth").write_bytes((path / "rng_state.pth").read_bytes())
    (path / "rng_state.pth").unlink()
    settings = json.loads((path / "run_settings.json").read_text())
    settings["free"]["ranks"] = 2
    (path / "run_settings.json").write_text(json.dumps(settings))
    checkpoint.finish(path)
    trainer = tiny_trainer(tmp_path, **SHORT, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert (trainer.state.global_step, trainer._generation_batch) == (4, 2)
    assert trainer.spending.rollouts == 2 * 16
    assert said(capsys) == ["ranks: 2, now 1"]
