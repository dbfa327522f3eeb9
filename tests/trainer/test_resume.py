"""A run that is resumed equals the uninterrupted one to the bit: any epoch, any step, between two generations too."""

import json
import re
import shutil

import pytest
import torch
from torch.utils._pytree import tree_flatten
from transformers import TrainerCallback

from basis_rl.baselines import Ppo, Sao, build_baseline
from basis_rl.run import checkpoint, progress
from basis_rl.samplers import Dynamic
from basis_rl.trainer import BasisTrainer
from tests.support.tiny import config, named_baseline, parity_reward, sums, tiny_model, tiny_tokenizer, tiny_trainer
from tests.trainer.test_state import RunningMean

# 16 prompts, 4 a generation batch, two slices of it used twice: 16 micro-batches an epoch, a generation every 4.
SHAPE = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 20}


class Noted(BasisTrainer):
    """Keeps which prompts each generation batch had."""

    def __init__(self, *args, **kwargs):
        self.order = {}
        super().__init__(*args, **kwargs)

    def _advantages(self, inputs, output):
        self.order[self._generation_batch] = [row["solution"] for row in inputs]
        return super()._advantages(inputs, output)


class SaveAt(TrainerCallback):
    """Leaves out the checkpoints after other steps: each takes longer than a step."""

    def __init__(self, *steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step in self.steps


def run(folder, baseline, resume=None, **given):
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer = tiny_trainer(folder, baseline, Noted, **{**SHAPE, **saving, **given})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same_end(a, b):
    for (name, p), (_, q) in zip(a.model.state_dict().items(), b.model.state_dict().items(), strict=True):
        assert torch.equal(p, q), name
    for p, q in zip(a.optimizer.state.values(), b.optimizer.state.values(), strict=True):
        assert all(torch.equal(p[key], q[key]) for key in p)
    if a._critic is not None:
        for p, q in zip(a._critic.parameters, b._critic.parameters, strict=True):
            assert torch.equal(p, q)
            left, right = a._critic.optimizer.state[p], b._critic.optimizer.state[q]
            assert left.keys() == right.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(left[key], right[key]) for key in left)
    states = [(each.baseline.state_dict(), each.selection and each.selection.state_dict()) for each in (a, b)]
    (left, shape), (right, other) = map(tree_flatten, states)
    assert shape == other
    for p, q in zip(left, right, strict=True):
        assert torch.allclose(p, q, 0, 0, equal_nan=True) if isinstance(p, torch.Tensor) else str(p) == str(q)
    untimed = [
        [{k: v for k, v in row.items() if "time" not in k and "second" not in k and k != "train_loss"} for row in t]
        for t in (a.state.log_history, b.state.log_history)
    ]
    assert untimed[0] == untimed[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, RunningMean(), max_steps=36, callbacks=[SaveAt(3, 4, 7, 8, 15, 22, 32, 35)])


# In the first epoch, in the middle of a generation batch of the second, at its end, in the last batch of the third.
@pytest.mark.parametrize("step", [15, 22, 32, 35])
def test_a_resumed_run_is_the_uninterrupted_one(step, whole, tmp_path):
    folder, expected = whole
    start = str(folder / f"checkpoint-{step}")
    resumed = run(tmp_path, RunningMean(), resume=start, save_strategy="no", max_steps=36)
    assert_same_end(expected, resumed)
    assert resumed.order or step == 35
    assert all(expected.order[batch] == prompts for batch, prompts in resumed.order.items())


LEARNT = {"lam": 0.9, "critic_epochs": 2, "critic_warmup_steps": 1}


def baseline_of(name, model):
    own = {
        "running mean": RunningMean,
        "head": lambda: Ppo(**LEARNT),
        "value model": lambda: Ppo(**LEARNT, critic_model=model, critic_learning_rate=1e-3),
        "sao": lambda: Sao(critic_model=model, critic_learning_rate=1e-3, critic_warmup_steps=1),
        "energies of gradients": lambda: build_baseline("basis_history", target="optimal_token"),
    }
    return own[name]() if name in own else named_baseline(name, sums())


def rare(completions, prompts, **kwargs):
    """Right only for every other prompt, and then by the length: groups of the others never have variance."""
    first = [int(prompt[0]["content"].split()[0]) for prompt in prompts]
    return [float(n % 2 and len(str(c)) % 2) for n, c in zip(first, completions, strict=True)]


# Two slices of a batch, and two steps of two micro-batches each, of which rows move.
ONCE = {"num_iterations": 1, "max_steps": 8}
MOVING = {"per_device_train_batch_size": 6, "num_generations": 3, "gradient_accumulation_steps": 2}
MOVING |= {"steps_per_generation": 4, "num_iterations": 1, "max_steps": 6}
# The baseline, the steps after which a run is resumed, and its settings.
CASES = {
    **{name: (name, (6,), {"max_steps": 8}) for name in ("basis_history", "bv_blend", "otb")},
    **{name: (name, (6,), {"max_steps": 8}) for name in ("head", "value model", "sao")},
    "rows that moved": ("running mean", (1, 3), MOVING),
    # 8 micro-batches: 3, 3, 2.
    "a short last step of the epoch": (
        "running mean", (5,), {"gradient_accumulation_steps": 3, "num_iterations": 1, "max_steps": 9},
    ),
    "a belief beside the baseline": ("grpo", (3, 4), {**ONCE, "prompt_sampler": "frontier"}),
    "the baseline's own belief": ("basis_history", (3,), {**ONCE, "prompt_sampler": "thompson"}),
    "groups of any size": ("basis_history", (3,), {**ONCE, "max_generations": 7}),
    "groups that were discarded": (
        "basis_history",
        (3,),
        {**ONCE, "reward_funcs": rare, "prompt_sampler": Dynamic(max_refills=3, sampler="thompson"), "max_steps": 5},
    ),
    "energies of gradients": ("energies of gradients", (2, 3), {**ONCE, "num_generations": 1, "max_steps": 6}),
    "hidden states": ("poise", (2,), {**ONCE, "max_completion_length": 14, "max_steps": 4}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_whatever_has_a_state_is_resumed_to_the_bit(case, tmp_path, tiny_path):
    name, steps, settings = CASES[case]
    saving = {"callbacks": [SaveAt(*steps)]}
    expected = run(tmp_path / "whole", baseline_of(name, str(tiny_path)), **settings, **saving)
    assert any(row.get("sampler/refills") for row in expected.state.log_history) == (rare in settings.values())
    for step in steps:
        start = str(tmp_path / "whole" / f"checkpoint-{step}")
        baseline = baseline_of(name, str(tiny_path))
        again = run(tmp_path / "again", baseline, resume=start, **{**settings, "save_strategy": "no"})
        assert_same_end(expected, again)


def test_metrics_since_the_last_log_survive_a_resume(tmp_path):
    """Lines of the log are means over three steps here, with a checkpoint among them; the loss is transformers'."""
    expected = run(tmp_path / "whole", RunningMean(), max_steps=9, logging_steps=3, save_steps=5)
    assert len([row for row in expected.state.log_history if "reward" in row]) == 3
    start = str(tmp_path / "whole" / "checkpoint-5")
    resumed = run(tmp_path / "again", RunningMean(), start, max_steps=9, logging_steps=3, save_strategy="no")
    for old, new in zip(expected.state.log_history, resumed.state.log_history, strict=True):
        kept = [k for k in old if not re.search("time|second|loss", k)]
        assert {k: old[k] for k in kept} == {k: new[k] for k in kept}


def test_order_without_interruption_is_trls(whole):
    from trl import GRPOConfig, GRPOTrainer

    seen = []

    class Plain(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            seen.append([row["solution"] for row in inputs])
            return super()._generate_and_score_completions(inputs)

    folder, expected = whole
    tokenizer = tiny_tokenizer()
    keep = {k: v for k, v in vars(config(folder / "trl", **SHAPE)).items() if k in GRPOConfig.__dataclass_fields__}
    args = GRPOConfig(**{k: v for k, v in keep.items() if k not in ("generation_batch_size", "deepspeed_plugin")})
    trainer = Plain(tiny_model(tokenizer), parity_reward, args, sums(), processing_class=tokenizer)
    trainer.train()
    assert list(expected.order.values())[: len(seen)] == seen


def test_what_was_cut_off_is_passed_over_and_removed(tmp_path):
    run(tmp_path, RunningMean(), max_steps=6, save_steps=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    cut = (tmp_path / "checkpoint-6").rename(tmp_path / "checkpoint-7")  # a step that is not saved again
    checkpoint.begin(cut)  # as a kill while it is written would leave it
    (cut / "optimizer.pt").unlink()
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-4"
    with pytest.raises(ValueError, match=r"checkpoint-7' was cut off .* newest whole one beside it is .*checkpoint-4"):
        run(tmp_path, RunningMean(), resume=str(cut))
    (tmp_path / "checkpoint-8").mkdir()  # killed right after the folder was made
    again = run(tmp_path, RunningMean(), resume=True, max_steps=10, save_steps=2)
    assert again.order.keys() == {1, 2}  # step 4 is the end of batch 0
    assert not cut.exists()
    assert checkpoint.newest(tmp_path).name == "checkpoint-10"


def test_older_checkpoints_go_when_the_new_one_is_complete(tmp_path, monkeypatch):
    whole_then = []
    finish = checkpoint.finish

    def spy(folder, *args):
        whole_then.append([path.name for path in checkpoint.checkpoints(tmp_path) if checkpoint.is_complete(path)])
        finish(folder, *args)

    monkeypatch.setattr(checkpoint, "finish", spy)
    trained = run(tmp_path, RunningMean(), max_steps=6, save_steps=2, save_total_limit=1)
    assert whole_then == [[], ["checkpoint-2"], ["checkpoint-4"]]
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-6"]
    trained.state.best_model_checkpoint = str(tmp_path / "checkpoint-6")
    for trained.state.global_step in (7, 8):
        trained._save_checkpoint(trained.model_wrapped, trial=None)
    left = [path.name for path in checkpoint.checkpoints(tmp_path)]
    assert left == ["checkpoint-6", "checkpoint-8"], "the best stays"


def test_another_dataset_is_refused(whole):
    folder, _ = whole
    with pytest.raises(ValueError, match="saved while training on other prompts"):
        run(folder / "x", RunningMean(), resume=str(folder / "checkpoint-4"), train_dataset=sums().shuffle(seed=1))


def test_rollouts_of_other_ranks_are_refused(whole, tmp_path):
    folder, _ = whole
    shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3")
    path = tmp_path / "checkpoint-3" / "phase_0.pt"
    content = torch.load(path)
    torch.save({**content, "place": {**content["place"], "ranks": 2}}, path)
    checkpoint.finish(path.parent)
    with pytest.raises(ValueError, match=r"in the middle of a generation batch, with \{'ranks': 2\}"):
        run(tmp_path, RunningMean(), resume=str(tmp_path / "checkpoint-3"))


def test_batches_of_another_shape_start_at_the_end_of_a_generation_batch_only(whole, tmp_path):
    folder, expected = whole
    other = {"num_iterations": 3, "max_steps": 14, "save_strategy": "no"}
    again = run(tmp_path, RunningMean(), resume=str(folder / "checkpoint-8"), **other)
    assert again.order.keys() == {2}
    assert again._step == 2 * 6 + 6  # two batches are done, now of six micro-batches each
    assert again.order[2] == expected.order[2]
    with pytest.raises(ValueError, match=r"in the middle of a generation batch, with .*'generate_every': 4"):
        run(tmp_path / "other", RunningMean(), resume=str(folder / "checkpoint-7"), num_iterations=3)


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_that_is_resumed_trains_nothing(tmp_path):
    """At its own end and at one that was lowered; weights, log and folder stay as they are."""
    expected = run(tmp_path, RunningMean(), max_steps=6, save_steps=3)
    expected.save_model(str(tmp_path))
    before = contents(tmp_path)
    for max_steps in (6, 4):
        again = run(tmp_path, RunningMean(), resume="auto", max_steps=max_steps, save_steps=3)
        assert again.was_finished
        assert again.state.global_step == 6
        assert again.order == {}
        again.save_model(str(tmp_path))
        after = contents(tmp_path)
        assert after.keys() == before.keys()
        changed = {str(name) for name in before if before[name] != after[name]}
        assert changed <= {".claim", "training_args.bin"}, changed  # the latter names max_steps
    longer = run(tmp_path, RunningMean(), resume="auto", max_steps=8, save_steps=3)
    assert not longer.was_finished
    assert longer.state.global_step == 8


def test_a_finished_run_whose_best_checkpoint_is_another_stays_finished(tmp_path):
    """With a learning rate of 0 the first evaluation is the best; transformers would delete the last checkpoint."""
    best = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": sums(4), "learning_rate": 1e-30}
    best |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "save_total_limit": 1}
    first = run(tmp_path, RunningMean(), max_steps=3, **best)
    assert first.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-3"]
    again = run(tmp_path, RunningMean(), resume="auto", max_steps=3, **best)
    assert again.was_finished
    assert again.order == {}


def test_a_checkpoint_keeps_the_end_of_the_log_and_a_resume_has_it_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "_ROWS", 3)
    shape = {"num_iterations": 1, "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": sums(4)}
    expected = run(tmp_path / "a", RunningMean(), max_steps=8, **shape)
    sizes = {}
    for step in range(3, 9):
        text = (tmp_path / "a" / f"checkpoint-{step}" / "trainer_state.json").read_text()
        rows = json.loads(text)["log_history"]
        assert len(rows) in (3, 4), "the rows of one step stay together"
        assert rows[-1]["step"] == step
        sizes[step] = len(text)
    assert sizes[8] < sizes[4] * 1.2
    assert len(expected.state.log_history) == 8 + 4 + 1
    for elsewhere in (True, False):
        start = str(tmp_path / "a" / "checkpoint-6")
        folder = tmp_path / ("b" if elsewhere else "a")
        assert_same_end(expected, run(folder, RunningMean(), start, max_steps=8, save_strategy="no", **shape))


def test_a_final_save_that_was_cut_off_is_marked_until_it_is_done_again(tmp_path, monkeypatch):
    trained = run(tmp_path, RunningMean(), max_steps=2)

    def killed(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(BasisTrainer, "_save", killed)
        with pytest.raises(Killed):
            trained.save_model(str(tmp_path))
    assert checkpoint.was_cut_off(tmp_path)
    trained.save_model(str(tmp_path))
    assert not checkpoint.was_cut_off(tmp_path)


def test_a_start_from_the_beginning_leaves_an_earlier_run_alone(tmp_path):
    """Its checkpoints have higher numbers: rotation would delete the new ones, and auto continue the old run."""
    run(tmp_path, RunningMean(), max_steps=6, save_steps=3)
    with pytest.raises(ValueError, match="of an earlier run"):
        run(tmp_path, RunningMean(), max_steps=2, save_steps=1)
    new = run(tmp_path, RunningMean(), max_steps=2, save_steps=1, save_total_limit=1, overwrite_output_dir=True)
    assert new.state.global_step == 2
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-2"]
    assert {path.name for path in (tmp_path / "previous-1").iterdir()} >= {"checkpoint-3", "checkpoint-6"}
    assert run(tmp_path, RunningMean(), resume="auto", max_steps=2).was_finished
    back = run(tmp_path / "previous-1", RunningMean(), str(tmp_path / "previous-1" / "checkpoint-3"), max_steps=4)
    assert back.state.global_step == 4
    assert checkpoint.newest(tmp_path / "previous-1").name == "checkpoint-4"


def test_a_run_whose_newest_checkpoint_is_damaged_continues_before_it(tmp_path):
    expected = run(tmp_path, RunningMean(), max_steps=6, save_steps=2)
    (tmp_path / "checkpoint-6" / "optimizer.pt").unlink()
    again = run(tmp_path, RunningMean(), resume="auto", max_steps=6, save_steps=2, save_total_limit=1)
    assert again.order.keys() == {1}
    assert_same_end(expected, again)
    assert (tmp_path / "previous-1" / "checkpoint-6").is_dir()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-6"]


@pytest.fixture(scope="module")
def with_history(tmp_path_factory):
    """A short run of a baseline with parameters and a state."""
    folder = tmp_path_factory.mktemp("history")
    return folder, run(folder, named_baseline("bv_blend", sums()), max_steps=4, save_steps=4)


def blend(**params):
    clusters = {name: i % 3 for i, name in enumerate(sums()["prompt_id"])}
    return build_baseline("bv_blend", **{"clusters": clusters, **params})


def other_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("{%", "Answer.{%", 1)
    return tokenizer


CHANGED = {
    "seed": ({"seed": 4}, "seed: 3, now 4"),
    "batch": ({"per_device_train_batch_size": 4}, "generation_batch_size: 16, now 8"),
    "group": ({"num_generations": 2}, "num_generations: 4, now 2"),
    "order": ({"shuffle_dataset": False}, "shuffle_dataset: true, now false"),
    "parameter": ({"baseline": {"decay": 0.5}}, "baseline.decay: 0.9, now 0.5"),
    "clusters": ({"baseline": {"clusters": dict.fromkeys(sums()["prompt_id"], 0)}}, "baseline.clusters: "),
    "sampler": ({"prompt_sampler": "variance"}, 'prompt_sampler: "uniform", now "variance"'),
    "template": ({"processing_class": other_template()}, "prompts as the model is given them: "),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_changes_the_order_of_the_data_or_the_state_is_refused(case, with_history, tmp_path):
    changes, message = CHANGED[case]
    params = changes.get("baseline", {})
    changes = {key: value for key, value in changes.items() if key != "baseline"}
    start = str(with_history[0] / "checkpoint-4")
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        run(tmp_path, blend(**params), start, max_steps=6, save_strategy="no", **changes)
    assert "allow_changed_settings" in str(refused.value)


def test_other_settings_are_told_and_those_may_be_allowed(with_history, tmp_path, capsys):
    start = str(with_history[0] / "checkpoint-4")
    settings = {"max_steps": 5, "save_strategy": "no", "learning_rate": 2e-2}
    run(tmp_path, named_baseline("bv_blend", sums()), start, **settings)
    said = re.findall("Resumed with another setting: (.*)", capsys.readouterr().out)
    assert said == [
        "learning_rate: 0.01, now 0.02.",
        "max_steps: 4, now 5.",
        "save_steps: 4, now 1.",
        'save_strategy: "steps", now "no".',
    ]
    run(tmp_path, blend(decay=0.5), start, allow_changed_settings=True, **settings)
    assert "Resumed with another setting: baseline.decay: 0.9, now 0.5." in capsys.readouterr().out
