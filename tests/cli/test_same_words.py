"""The same mistake is refused with the same words by Python, `train` and `check`, before the weights are loaded."""

import json
from contextlib import nullcontext

import pytest

from basis_rl import BasisTrainer
from basis_rl.cli.main import main
from basis_rl.data import load_prompts
from basis_rl.estimate.footprint import Launch, planned
from basis_rl.recipe.build import (
    build_recipe_baseline,
    build_rewards,
    build_tools,
    load_config_and_tokenizer,
    load_eval_data,
    load_training_data,
)
from basis_rl.recipe.file import parse_recipe
from basis_rl.samplers import build_sampler
from basis_rl.trainer import plan
from basis_rl.values import ValueTable

OWN = {
    "output_dir": "out",
    "dataset_kwargs": None,
    "objective": None,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "steps_per_generation": 1,
}
BAD_GOLD = {"dataset_name": "bad"}
DYNAMIC = {"baseline": "none", "prompt_sampler": "dynamic"}
LENGTH = "max_completion_length"


def table(**kwargs):
    return {"baseline": "basis", "num_generations": 1, "baseline_kwargs": {"values": "table", **kwargs}}


# What is wrong, how it is right one step away, what the message says, and which other commands say it too.
MISTAKES = {
    "group": ({"num_generations": 1}, {"num_generations": 2}, "needs at least 2 rollouts", ()),
    "temperature": ({"temperature": 0.0}, {"temperature": 0.1}, "temperature is 0", ("values", "sweep")),
    "reporter": ({"report_to": "wandb"}, {"report_to": "none"}, "wandb is not installed", ("sweep",)),
    "folder": ({"output_dir": "/proc/version/run"}, {}, "is not a folder", ()),
    "refills": ({**DYNAMIC, "num_generations": 1}, DYNAMIC, "Set num_generations to 2 or more", ()),
    "size": ({"max_train_samples": 1}, {"max_train_samples": 2}, "one generation batch takes 2", ("values", "sweep")),
    "golds": (BAD_GOLD, {**BAD_GOLD, "on_invalid_gold": "drop"}, "do not verify", ("values",)),
    "context": ({LENGTH: 2048}, {LENGTH: 1900}, "context is 2048", ("values", "sweep")),
    "table": (table(), table(accept_mismatch=True), "temperature: table 0.3, run 1.0", ()),
}


@pytest.fixture
def recipe(recipe, tmp_path, monkeypatch):
    """Writes a recipe with changes, beside its data and a value table of another temperature."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "get_available_reporting_integrations", lambda: ["tensorboard"])
    monkeypatch.setattr("basis_rl.cli.train.run", lambda *given: 0)
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1), "level": i % 2} for i in range(8)]
    (tmp_path / "good.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, [*rows[:7], {**rows[7], "answer": ""}])))

    def write(dataset_name="good", **changes):
        return recipe(dataset_name=f"{dataset_name}.jsonl", **changes)

    with planned(Launch()):
        ids = load_prompts(parse_recipe([write()]).data, conversational=True)["prompt_id"]
    ValueTable.from_rewards({name: [0.0, 1.0] for name in ids}, provenance={"temperature": 0.3}).save("table")
    return write


def by_python(path):
    """What a script with the same settings is refused with."""
    recipe = parse_recipe([path])
    run = recipe.run
    _, tokenizer = load_config_and_tokenizer(recipe.model, recipe.args)
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        BasisTrainer(
            recipe.model.model_name_or_path,
            build_rewards(recipe),
            recipe.args,
            load_training_data(recipe, tokenizer),
            load_eval_data(recipe, tokenizer),
            baseline=build_recipe_baseline(run),
            objective=run.objective,
            prompt_sampler=build_sampler(run.prompt_sampler, **(run.prompt_sampler_kwargs or {})),
            tools=build_tools(run),
            processing_class=tokenizer,
        )
    return str(refused.value)


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_refused_everywhere_in_the_same_words(case, recipe, capsys, monkeypatch):
    wrong, right, words, others = MISTAKES[case]
    if case == "folder":  # a run's folder is locked before it is checked
        monkeypatch.setattr("basis_rl.cli.train.held", lambda folder: nullcontext())

    def told(command, path):
        capsys.readouterr()
        more = {"values": ["--values_output_dir", "made"], "sweep": ["--baselines", "rloo", "--output_dir", "swept"]}
        code = main([command, path, *more.get(command, [])])
        error = capsys.readouterr().err
        return None if code == 0 else error.removeprefix("basis-rl: error: ").rstrip("\n")

    path = recipe(**wrong)
    message = by_python(path)
    assert words in message
    with monkeypatch.context() as unloaded:
        unloaded.setattr("basis_rl.recipe.build.BasisTrainer", None)
        unloaded.setattr("basis_rl.engine.local.AutoModelForCausalLM", None)
        for command in ("train", "check", *others):
            assert (told(command, path) or "").removeprefix("rloo-seed0: ") == message, command
    path = recipe(**right)
    assert told("check", path) is None
    assert told("train", path) is None


CHATS = [
    [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{i} + 1 ="}]
    + [{"role": "assistant", "content": "?"}, {"role": "user", "content": "Well?"}] * (i % 2)
    for i in range(8)
]


@pytest.mark.parametrize("prompts", [CHATS, [f"{i} + 1 =\n" for i in range(8)]])
def test_prompts_of_a_trl_recipe_are_those_that_trl_is_given(prompts, recipe, tmp_path, capsys):
    """And every column is there for a reward; a line says what is done, and where answers are looked for follows."""
    rows = [{"prompt": each, "answer": str(i + 1), "level": i} for i, each in enumerate(prompts)]
    (tmp_path / "trl.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = recipe(dataset_name="trl", prompt_template=None, reward_funcs=["math_verify"])
    given = []

    def run(recipe, trainer, checkpoint):
        first = next(iter(trainer.get_train_dataloader()))
        given.extend((row["prompt"], row["answer"], row["level"]) for row in first)
        given.append(trainer._tokenize_prompts([row["prompt"] for row in first])[0])
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("basis_rl.cli.train.run", run)
        assert main(["train", path]) == 0
    *kept, tokens = given
    assert kept
    assert all(row in [(each["prompt"], each["answer"], each["level"]) for each in rows] for row in kept)
    tokenizer = load_config_and_tokenizer(parse_recipe([path]).model, parse_recipe([path]).args)[1]
    expected = [
        tokenizer(prompt)["input_ids"]
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
        for prompt, _, _ in kept
    ]
    assert tokens == expected
    assert capsys.readouterr().err.count("as the dataset has them") == 1
    assert main(["check", path]) == 0
    shown = capsys.readouterr().out
    assert shown.count("as the dataset has them") == 1
    assert "answer_in: anywhere" in shown
    assert main(["check", path, "--prompt_template", "{prompt}"]) == 0
    assert "prompt_template '{prompt}' is put around each problem" in capsys.readouterr().out
