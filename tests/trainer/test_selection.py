"""Prompts drawn by a sampler: by the belief before the batch, the same on all ranks, resumed to the bit, undone."""

from itertools import groupby, product
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset

from basis_rl.baselines import BasisHistory, Rloo, build_baseline
from basis_rl.run.errors import SelectionFailed
from basis_rl.samplers import Draw, Dynamic, Frontier, Uniform, Variance, WeightedSampler, build_sampler
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.selection import Resampling, Selection, drawn
from tests.support.batches import batch_of
from tests.support.tiny import parity_reward, sums, tiny_trainer
from tests.trainer.test_resume import assert_same_end, rare

# Two generation batches of 16 rollouts, each used in two optimizer steps.
SHAPE = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "num_iterations": 1, "max_steps": 6}


class Noted(BasisTrainer):
    """Keeps each batch: its prompts, the belief about all prompts when it was drawn, advantages before and after."""

    def __init__(self, *args, **kwargs):
        self.batches = []
        super().__init__(*args, **kwargs)

    def _advantages(self, inputs, output):
        belief = self.selection.belief.believed(self.selection.prompt_ids) if self.selection else None
        trained = super()._advantages(inputs, output)
        self.batches.append(SimpleNamespace(
            ids=[row["prompt_id"] for row in inputs], belief=belief, trained=trained.cpu(), batch=self._pending.newest,
            own=self.baseline.advantages(self._pending.newest).values,
        ))  # fmt: skip
        return trained


def build(folder, baseline="grpo", sampler="variance", **given):
    return tiny_trainer(folder, baseline, Noted, prompt_sampler=sampler, **{**SHAPE, **given})


def run(folder, *args, resume=None, **kwargs):
    trainer = build(folder, *args, **kwargs)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer, name):
    return [row[f"sampler/{name}"] for row in trainer.state.log_history if f"sampler/{name}" in row]


@pytest.mark.parametrize("baseline", ["basis_history", "grpo"])
def test_batches_are_drawn_by_the_belief_of_the_batches_before(baseline, tmp_path):
    """Drawn once more by hand: the sampler, the belief when the batch was generated, the seed and the number."""
    trainer = run(tmp_path, baseline, max_steps=8)
    assert (trainer.selection.belief is trainer.baseline) == (baseline != "grpo")
    assert len(trainer.batches) == 4
    ids = trainer.selection.prompt_ids
    seen, beliefs = set(), []
    for number, each in enumerate(trainer.batches):
        belief = SimpleNamespace(
            reward_range=(0.0, 1.0),
            believed=lambda names, each=each: tuple(part[[ids.index(n) for n in names]] for part in each.belief),
        )
        rows = drawn(Variance(), belief, ids, 4, (3, number, 0)).rows
        assert each.ids == [ids[row] for row in rows.tolist() for _ in range(4)]
        assert each.batch.prompt_ids == each.ids
        seen |= set(each.ids)
        beliefs.append(each.belief[0])
        assert logged(trainer, "coverage")[number] == pytest.approx(len(seen) / 16)
        assert logged(trainer, "believed")[number] == pytest.approx(float(each.belief[0][rows].mean()))
        assert logged(trainer, "reward")[number] == pytest.approx(float(each.batch.rewards.mean()))
        if baseline == "grpo":  # without `correct` nothing is multiplied
            torch.testing.assert_close(each.trained, each.own.float())
    assert not torch.equal(beliefs[1], beliefs[2])  # it learns


@pytest.mark.parametrize(
    ("baseline", "given", "blind"),
    [
        (BasisHistory(), {}, True),
        ("spo", {}, True),
        (BasisHistory(), {"max_steps": 24}, False),
        (BasisHistory(prior="text"), {}, False),
        ("basis", {}, False),
        ("grpo", {}, False),
        (BasisHistory(), {"sampler": "uniform"}, False),
    ],
)
def test_a_sampler_that_cannot_tell_prompts_apart_is_named(baseline, given, blind, tmp_path, caplog):
    """12 draws of 16 prompts, or 48; the value table, the texts, and the belief beside `grpo` know new prompts."""
    build(tmp_path, baseline, **given)
    assert ("hardly better than 'uniform'" in caplog.text) == blind


def test_the_default_is_trls_order_to_the_bit(tmp_path):
    plain, named = run(tmp_path, sampler="uniform"), run(tmp_path, sampler=Uniform())
    assert plain.selection is None
    epoch = list(plain.epoch_order(0))
    trained = [name for each in plain.batches for name in each.ids]
    assert trained == [sums()["prompt_id"][row] for row in epoch][: len(trained)]
    seen = [len(set(trained[: 16 * (k + 1)])) / 16 for k in range(3)]
    assert logged(plain, "coverage") == pytest.approx(seen)
    assert_same_end(plain, named)


def test_a_batch_that_was_drawn_ahead_is_not_drawn_again():
    """The belief has learnt since, and a resumed run has another one."""
    first, second = fake_selection(), fake_selection()
    ahead = [row["prompt_id"] for row in first.rows(1)]
    second.load_state_dict(first.state_dict())
    second.belief.mean += 5.0
    assert [row["prompt_id"] for row in second.rows(1)] == ahead
    fresh = fake_selection()
    fresh.belief = Believing(torch.linspace(0, 1, 16))
    assert [row["prompt_id"] for row in fresh.rows(1)] != ahead


@pytest.mark.parametrize("sampler", ["frontier", "thompson", "dynamic"])
def test_a_seed_of_any_size_draws_batches_of_its_own(sampler):
    ids = [str(i) for i in range(64)]
    belief = Believing(torch.linspace(0, 1, 64))
    of = [
        (seed, number, refill)
        for seed in (1, 2**24, 20261124, 2**32 - 1, 2**63)
        for number in (0, 1)
        for refill in (0, 1)
    ]
    rows = [tuple(drawn(build_sampler(sampler), belief, ids, 4, each).rows.tolist()) for each in of]
    assert len(set(rows)) == len(of)
    assert rows == [tuple(drawn(build_sampler(sampler), belief, ids, 4, each).rows.tolist()) for each in of]


def test_the_rollouts_of_a_prompt_have_rows_of_their_own():
    """What a tool says is added to a prompt in place."""
    selection = fake_selection()
    prompts = [[{"role": "user", "content": str(i)}] for i in range(16)]
    selection.dataset = Dataset.from_dict({"prompt_id": [str(i) for i in range(16)], "prompt": prompts})
    rows = selection.rows(0)
    assert all(row["prompt"] == [{"role": "user", "content": row["prompt_id"]}] for row in rows)
    rows[0]["prompt"].append("said")
    assert all(len(row["prompt"]) == 1 for row in rows[1:])


class Believing:
    reward_range = (0.0, 1.0)

    def __init__(self, mean):
        self.mean = mean

    def believed(self, prompt_ids):
        rows = [int(name) for name in prompt_ids]
        return self.mean[rows].double().clamp(0, 1), torch.zeros(len(rows), dtype=torch.float64)


def fake_selection(rank=0, ranks=1, sampler=None, prompts=16, batch=8, rollouts=2, most=None):
    accelerator = SimpleNamespace(process_index=rank, num_processes=ranks)
    args = SimpleNamespace(
        seed=1, num_generations=rollouts, max_steps=-1, num_train_epochs=9,
        max_generations=most, prompts_per_batch=batch // rollouts,
    )  # fmt: skip
    ids = [str(i) for i in range(prompts)]
    dataset = Dataset.from_list([{"prompt_id": name, "prompt": name} for name in ids])
    found = Selection(sampler or Variance(), build_baseline("rloo"), dataset, ids, args, accelerator)
    found.belief = Believing(torch.linspace(0, 1, prompts).flip(0) ** 2)
    return found


@pytest.mark.parametrize("most", [None, 8])
def test_ranks_have_their_parts_of_one_draw(most):
    given = {"batch": 16, "rollouts": 4, "most": most}
    whole = [row["prompt_id"] for row in fake_selection(**given).rows(0)]
    parts = [[row["prompt_id"] for row in fake_selection(rank, 4, **given).rows(0)] for rank in range(4)]
    assert [name for part in parts for name in part] == whole
    sizes = [len(list(rows)) for _, rows in groupby(whole)]
    assert len(sizes) == len(set(whole)) == 4
    assert sum(sizes) == 16
    assert (len(set(sizes)) == 1) == (most is None)


class Believed(Rloo):
    """RLOO with a belief of its own, which stays."""

    reward_range = (0.0, 1.0)

    def believed(self, prompt_ids):
        places = [sums()["prompt_id"].index(name) for name in prompt_ids]
        return torch.tensor([0.03 * place for place in places], dtype=torch.float64), torch.zeros(len(places))


@pytest.mark.parametrize("sampler", ["uniform", "frontier"])
def test_rollouts_are_divided_by_the_belief_and_compared_within_their_prompt(sampler, tmp_path):
    """Groups of any size, by plain loops; the batch's size is fixed, and an epoch has as many batches as without."""
    trainer = run(tmp_path, Believed(), sampler, max_generations=9, num_train_epochs=2, max_steps=-1)
    alike = run(tmp_path / "alike", "rloo", num_train_epochs=2, max_steps=-1)
    assert trainer.state.global_step == alike.state.global_step
    trained = 0
    # The best division of four prompts that are alike is an equal one.
    unequal = 0
    for each in trainer.batches:
        sizes = {name: each.ids.count(name) for name in dict.fromkeys(each.ids)}
        variances = [float(value * (1 - value)) for value in trainer.baseline.believed(list(sizes))[0]]
        best = sorted(
            (sum(v / n for v, n in zip(variances, counts, strict=True)), counts)
            for counts in product(range(2, 10), repeat=4)
            if sum(counts) == 16
        )
        found = sum(v / n for v, n in zip(variances, sizes.values(), strict=True))
        assert found == pytest.approx(best[0][0])
        unequal += len(set(sizes.values())) > 1
        rewards = each.batch.rewards.tolist()
        for row, name in enumerate(each.ids):
            others = [rewards[k] for k, other in enumerate(each.ids) if other == name and k != row]
            expected = rewards[row] - sum(others) / len(others)
            assert float(each.trained[row]) == pytest.approx(expected, abs=1e-6)
            trained += expected != 0
    assert trained > 0
    assert unequal > 0
    saved = [row["sampler/variance_saved"] for row in trainer.state.log_history if "sampler/variance_saved" in row]
    assert saved[-1] == pytest.approx(1 - found / (sum(variances) / 4))
    assert logged(trainer, "group_size_max")[-1] == max(sizes.values())


def test_a_correction_gives_the_uniform_mean_again(tmp_path):
    """Over many draws the weighted mean of a batch is that of all prompts; weights are those of each row."""
    value = torch.arange(16, dtype=torch.float64) ** 2
    for shape in ({"rollouts": 1, "batch": 4}, {"rollouts": 4, "batch": 16, "most": 8}):
        found = fake_selection(sampler=Variance(floor=0.1, correct=True, clip=(0.0, 1e9)), **shape)
        total = 0.0
        unequal = 0
        for number in range(600):
            rows = [int(row["prompt_id"]) for row in found.rows(number)]
            sizes = found.sizes(number)
            unequal += len(sizes.unique()) > 1
            ratios = found._draws[number].ratio.repeat_interleave(sizes)
            assert found.chances(number) == pytest.approx([float(4 / 16 / ratio) for ratio in ratios])
            total += float((value[rows] * found.weights(number)).mean()) / 600
            found._draws.clear()
        assert (unequal > 200) == ("most" in shape)
        assert total == pytest.approx(float(value.mean()), rel=0.05)
    clipped = fake_selection(sampler=Variance(correct=True, clip=(0.5, 1.5)))
    clipped.rows(0)
    assert float(clipped.weights(0).min()) >= 0.5
    assert float(clipped.weights(0).max()) <= 1.5

    sampler = Frontier(correct=True, clip=(0.2, 3.0), floor=0.1)
    for baseline, settings in (("rloo", {}), ("otb", {})):
        trainer = run(tmp_path, baseline, sampler, **settings)
        weighed = 0
        for number, each in enumerate(trainer.batches):
            belief = SimpleNamespace(reward_range=(0.0, 1.0), believed=lambda names, each=each: each.belief)
            draw = drawn(sampler, belief, trainer.selection.prompt_ids, 4, (3, number, 0))
            ratio = draw.ratio.clamp(0.2, 3.0)
            weight = ratio.repeat_interleave(4).reshape(-1, *[1] * (each.own.ndim - 1))
            width = each.trained.shape[1] if each.trained.ndim == 2 else None
            expected = each.own * weight if width is None else (each.own * weight)[:, :width]
            torch.testing.assert_close(each.trained, expected.float())
            logged = float(each.trained.abs().max())
            assert [row for row in trainer.state.log_history if "sampler/believed" in row][number][
                "advantages/max_abs"
            ] == pytest.approx(logged)
            weighed += int((ratio != 1).any())
        assert weighed > 0


def test_evaluation_has_its_own_prompts(tmp_path):
    trainer = build(tmp_path, sampler="frontier", per_device_eval_batch_size=4, num_generations_eval=4)
    asked = []
    reward = trainer.reward_funcs[0]
    trainer.reward_funcs[0] = lambda **kwargs: asked.extend(kwargs["prompt_id"]) or reward(**kwargs)
    trainer.model.eval()
    trainer.evaluate(sums(4))
    assert set(asked) == set(sums(4)["prompt_id"])
    assert len(asked) == 16


class Late(WeightedSampler):
    """Fails in the second batch, in its own way."""

    def __init__(self, error):
        self.error = error

    def weights(self, mean, variance):
        if bool((mean != mean[0]).any()):
            raise self.error
        return torch.ones_like(mean)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("all weights are 0."), "has no prompts for generation batch 1: all weights"),
        (KeyError("x"), r"raised KeyError for generation batch 1: .*test_selection.py, line \d+"),
    ],
)
def test_whatever_a_sampler_raises_is_one_message_with_a_checkpoint(error, said, tmp_path):
    trainer = build(tmp_path, BasisHistory(), Late(error), save_strategy="steps", save_steps=1000, max_steps=8)
    with pytest.raises(SelectionFailed, match=f"Prompt sampler 'Late' {said}") as found:
        trainer.train()
    assert found.value.__cause__ is error
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()


class Undecided(Dynamic):
    def keeps(self, rewards):
        return [True] * len(rewards)


def test_a_sampler_that_does_not_say_what_it_keeps_ends_the_run(tmp_path):
    with pytest.raises(SelectionFailed, match=r"'Undecided' .* generation batch 0: `keeps` must return one bool"):
        run(tmp_path, "grpo", Undecided())


class Twice(Variance):
    def draw(self, *args):
        return Draw(torch.zeros(4, dtype=torch.int64), None, {})


class Sure(Variance):
    known_chances = False


class Refilling(Variance):
    max_refills = 2


TWICE = Dataset.from_list([dict(row) for row in sums(8)] * 2)
STREAM = IterableDataset.from_generator(lambda: iter(sums()))


class Never(Variance):
    def weights(self, mean, variance):
        return torch.zeros_like(mean)


@pytest.mark.parametrize(
    ("sampler", "settings", "said"),
    [
        (Twice(), {}, "did not draw 4 different prompts"),
        (Never(), {}, "0 prompts have a positive weight, and a batch takes 4"),
        (Sure(correct=True), {}, "leave `correct` out"),
        (Refilling(correct=True), {}, "cannot `correct` batches that it refills"),
        ("frontier", {"train_dataset": TWICE}, r"draws different prompts, but 8 of 16 rows .* take .* 'uniform'"),
        ("variance", {"train_dataset": STREAM}, "needs a dataset that can be indexed, not a IterableDataset"),
        ("uniform", {"max_generations": 4}, "max_generations .4. must be above num_generations .4., the average"),
        (
            "uniform",
            {"max_generations": 4, "num_generations": 2},
            "nothing to divide: baseline 'rloo' needs 2 rollouts",
        ),
        ("dynamic", {"max_generations": 8}, "max_generations does not work with prompt_sampler 'dynamic'"),
        ("uniform", {"max_generations": 8, "train_dataset": STREAM}, "'uniform' without max_generations"),
        ("dynamic", {"rollouts": "stream", "use_vllm": True, "vllm_mode": "server"}, "rollouts: stream"),
    ],
)
def test_mistakes_are_one_message_before_anything_is_spent(sampler, settings, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        build(tmp_path, "rloo", sampler, **settings)


class Square(Rloo):
    """Takes each four rows for a group."""

    def center(self, rewards, group_ids):
        return rewards.view(-1, 4).mean(dim=1).repeat_interleave(4)


class Blind(Rloo):
    """The same, and what is over for a smaller one."""

    def center(self, rewards, group_ids):
        return super().center(rewards, torch.arange(len(rewards)) // 4)


@pytest.mark.parametrize(
    ("baseline", "said"), [(Square(), "RuntimeError: shape"), (Blind(), "PromiseError: what a rollout gets")]
)
def test_a_baseline_that_needs_equal_groups_is_refused_before_a_rollout(baseline, said, tmp_path):
    """It is asked, and only where groups will be unequal."""
    build(tmp_path, baseline, "uniform")
    name = type(baseline).__name__
    with pytest.raises(ValueError, match=f"baseline '{name}' does not take them .{said}.* Leave max_generations out"):
        build(tmp_path, baseline, "uniform", max_generations=8)


def test_rewards_that_miss_the_end_of_a_range_by_a_rounding_are_not_outside(caplog):
    """Sums of float32 rewards may be off in their last digit. Nor is anybody told whose prompts no belief chooses, or
    whose belief learns the range."""
    learnt = fake_selection()
    learnt.belief = learnt.own_belief
    learnt.update(batch_of([3.0] * 4, "0123"))
    assert not caplog.text

    def learning(rewards, sampler=None):
        selection = fake_selection(sampler=sampler)
        selection.belief.reward_range = (-1.0, 3.0)
        for _ in range(2):
            selection.update(batch_of(rewards, "0123"))
        return caplog.text.count("rewards are outside -1 to 3")

    assert learning([3.000003, -1.000003, 3.0, -1.0]) == 0
    assert learning([3.0001, -1.0, 0.0, 1.0], Uniform()) == 0
    assert learning([3.0001, -1.0, 0.0, 1.0]) == 1
    assert learning([3.0, -1.0001, 0.0, 1.0]) == 2


# Refills.


@pytest.mark.parametrize("needed", [True, False])
def test_a_sampler_that_needs_a_belief_is_given_it_for_each_refill(needed):
    """Another one only for the metrics of a first draw."""
    given = []

    class Noting(Uniform):
        needs_belief = needed

        def draw(self, candidates, belief, size, generator):
            given.append(belief)
            return super().draw(candidates, belief, size, generator)

    selection = fake_selection(sampler=Noting())
    selection.rows(0)
    for refill in (1, 2):
        selection.more(0, refill, [[refill]])
    assert given[1:] == [selection.belief, *([selection.belief if needed else None] * 2)]


def test_groups_without_variance_are_replaced_and_all_rollouts_counted(tmp_path):
    def always(completions, **kwargs):
        return [1.0] * len(completions)

    def noting(completions, log_extra, **given):
        log_extra("said", list(map(str, completions)))
        return rare(completions, **given)

    kept = run(tmp_path, "grpo", Dynamic(max_refills=12), reward_funcs=noting, max_steps=8)
    plain = run(tmp_path, "grpo", Dynamic(max_refills=1), reward_funcs=always)

    def varied(trainer):
        return [float((each.batch.rewards.view(-1, 4).std(dim=1) > 0).float().mean()) for each in trainer.batches]

    assert varied(kept) == [1.0] * 4
    for each in kept.batches:  # what is trained on belongs together: prompt, completion, reward
        first = [int(sums()["prompt"][sums()["prompt_id"].index(name)][0]["content"].split()[0]) for name in each.ids]
        assert all(n % 2 for n in first)
        assert len(set(each.ids)) == 4
        assert each.batch.rewards.shape == (16,)
    noted = list(zip(kept._logs["extra"]["said"], map(str, kept._logs["completion"]), strict=True))
    assert all(said in (None, completion) for said, completion in noted)
    assert (None in dict(noted)) == (logged(kept, "refills")[-1] > 0)
    refills = logged(kept, "refills")
    assert sum(refills) > 0
    assert kept.spending.rollouts > 4 * 16
    assert varied(plain) == [0.0] * 3
    assert plain.spending.rollouts == 3 * 2 * 16
    assert logged(plain, "refills") == [1.0] * 3
    for name in ("believed_solved", "believed_impossible", "effective_prompts", "coverage"):
        assert len(logged(plain, name)) == 3


@pytest.mark.parametrize(("prompts", "ranks"), [(40, 1), (40, 2), (10, 1), (10, 2)])
def test_no_refill_brings_a_prompt_twice(prompts, ranks):
    """Neither one that is in the batch nor, while there are others, one that was drawn for it before."""
    for number in range(5):
        selection = fake_selection(sampler=Dynamic(), prompts=prompts, batch=16)
        batch = [row["prompt_id"] for row in selection.rows(number)][::2]
        tried, of_rank = set(batch), 8 // ranks
        for refill, refused in enumerate(([[4, 5, 6, 7]], [[4, 6]], [[4]]), 1):
            if ranks == 2:
                refused = [[group - 4 for group in refused[0]], [0]]
            rows = [row["prompt_id"] for row in selection.more(number, refill, refused)][::2]
            most = max(map(len, refused))
            assert len(rows) == ranks * most
            if prompts == 40:
                assert not set(rows) & tried
            tried |= set(rows)
            for rank, groups in enumerate(refused):
                for k, group in enumerate(groups):
                    batch[rank * of_rank + group] = rows[rank * most + k]
            assert len(set(batch)) == 8


def refilling(sampler, rewarded, ranks=1, rank=0, prompts=64):
    """A `Resampling` whose rollouts are numbers, which `rewarded` scores: the reward of each prompt of all ranks."""
    selection = fake_selection(rank, ranks, sampler, prompts, batch=32, rollouts=4)

    def generate(asked):
        return (None, None, None, asked, None, None, None, None)

    def score(rows, asked, *rest):
        of_all = selection.asked if rest[-1] == "again" else selection.prompts(selection.number)
        return torch.tensor([[reward] for row in of_all.tolist() for reward in rewarded(row)])

    def score_again(*given):
        return score(*given, "again")

    return Resampling(selection, generate, score, score_again, torch.ones(1))


def batches_of(resampling, count):
    """Of each generation batch what is trained on, ``{prompt: rewards}``, and what is discarded."""
    for number in range(count):
        selection = resampling.selection
        selection.number = number
        resampling.inputs = selection.rows(number)
        _, rewards = resampling.generated([row["prompt"] for row in resampling.inputs], number, {})
        totals = rewards.view(-1, 4)
        rows = selection.prompts(number)
        yield dict(zip(rows.tolist(), totals.tolist(), strict=True)), resampling.take_discarded(number, texts=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_that_was_rewarded_is_trained_on_or_discarded(ranks):
    generator, asked = torch.Generator().manual_seed(0), []

    def rewarded(row):
        drawn = (torch.rand(4, generator=generator) < row / 63).float().tolist()
        asked.append((row, drawn))
        return drawn

    for kept, discarded in batches_of(refilling(Dynamic(max_refills=2), rewarded, ranks), 4):
        again = [
            (int(name), rewards)
            for name, rewards in zip(discarded.prompt_ids[::4], discarded.rewards.view(-1, 4).tolist(), strict=True)
        ]
        assert sorted([*kept.items(), *again]) == sorted(asked)
        if ranks == 1:
            assert [group for group in asked if group in again] == again  # in the order in which they were rewarded
        assert discarded.group_ids.tolist() == [k for k in range(len(again)) for _ in range(4)]
        assert discarded.prompt_texts == discarded.prompt_ids
        asked.clear()


def test_ranks_discard_the_same():
    """Also what a rank that misses fewer groups than another has drawn in vain."""

    def rewarding():
        generator = torch.Generator().manual_seed(0)
        return lambda row: (torch.rand(4, generator=generator) < row / 63).float().tolist()

    ranks = [list(batches_of(refilling(Dynamic(), rewarding(), 2, rank), 4)) for rank in (0, 1)]
    for (kept, discarded), (kept_there, there) in zip(*ranks, strict=True):
        assert kept == kept_there
        assert discarded.prompt_ids == there.prompt_ids
        assert torch.equal(discarded.rewards, there.rewards)


def test_what_is_believed_of_easy_and_hard_prompts_is_not_of_their_mixed_groups_alone():
    """A prompt that is right once in twenty times, in groups of four, was believed to be so once in four times."""
    generator, belief = torch.Generator().manual_seed(0), BasisHistory()
    chances = torch.tensor([0.05, 0.5, 0.95, 0.5]).repeat(16)

    def rewarded(row):
        return (torch.rand(4, generator=generator) < chances[row]).float().tolist()

    ends = []
    for kept, discarded in batches_of(refilling(Dynamic(), rewarded), 60):
        ids = [str(row) for row in kept for _ in range(4)]
        rewards = [reward for group in kept.values() for reward in group]
        belief.update(batch_of(rewards, ids))
        if discarded is not None:
            belief.update(discarded)
        ends.append(belief.believed([str(row) for row in range(64)])[0].view(16, 4).mean(dim=0))
    believed = torch.stack(ends[-20:]).mean(dim=0)
    assert believed.tolist() == pytest.approx([0.05, 0.5, 0.95, 0.5], abs=0.05)


class Deaf(Rloo):
    def __init__(self):
        self.steps = []

    def update(self, batch):
        self.steps.append(batch.step)


def test_a_batch_that_was_resampled_has_no_rewards_of_turns_of_an_evaluation(tmp_path):
    def by_turn(completions, **given):
        return [[each] for each in rare(completions, **given)]

    evaluated = {"eval_dataset": sums(4), "eval_strategy": "steps", "eval_steps": 2, "reward_funcs": by_turn}
    trainer = run(tmp_path, "otb", Dynamic(), max_steps=4, **evaluated)
    assert [each.batch.turn_rewards for each in trainer.batches] == [None, None]


def test_baselines_without_a_belief_do_not_see_what_was_discarded(tmp_path):
    trainer = run(tmp_path, Deaf(), Dynamic(sampler="frontier"), reward_funcs=rare, max_steps=4)
    assert trainer.baseline.steps == [0, 1]
    assert trainer.selection.own_belief.step == 4  # the belief beside it does


class Declaring:
    """`parity_reward`, which may declare its range, in -1 and +1."""

    __name__ = "declaring"

    def __init__(self, reward_range=None):
        self.reward_range = reward_range

    def __call__(self, completions, completion_ids, **kwargs):
        return [2.0 * reward - 1.0 for reward in parity_reward(completions, completion_ids)]


@pytest.mark.parametrize("make", [BasisHistory, Rloo])
def test_the_belief_takes_the_range_that_the_rewards_declare_and_else_learns_it(make, tmp_path):
    settings = {"reward_funcs": [Declaring((-1.0, 1.0))], "reward_weights": [2.0], "max_steps": 4}
    told = build(tmp_path / "told", make(), **settings)
    assert told.selection.belief.reward_range == (-2.0, 2.0)
    found = run(tmp_path / "learnt", make(), **{**settings, "reward_funcs": [Declaring()]})
    assert found.selection.belief.reward_range == (-2.0, 2.0)
    if make is BasisHistory:
        told.train()
        for trainer, known in ((told, [1.0, 1.0]), (found, [0.0, 1.0])):
            rows = trainer.state.log_history
            assert [row["baseline/range_known"] for row in rows if "baseline/range_known" in row] == known
