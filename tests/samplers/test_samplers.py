"""The contract of a prompt sampler: what is in the registry keeps it, and what breaks it is told how, all at once."""

from dataclasses import replace

import pytest
import torch

from basis_rl.conformance import SamplerError, check_sampler
from basis_rl.conformance.samplers import ExampleBelief, example_beliefs
from basis_rl.samplers import (
    SAMPLERS,
    Draw,
    DropSolved,
    Dynamic,
    Frontier,
    PromptSampler,
    SpoWeights,
    Thompson,
    Uniform,
    Variance,
    WeightedSampler,
    build_sampler,
    sampler_name,
)
from basis_rl.samplers.base import pool_indices
from examples.custom_sampler import Harder

ALL = ["rows", "determinism", "no_side_effect", "every_prompt", "ratio", "keeps"]
IDS = [f"prompt-{i}" for i in range(16)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", SAMPLERS)
def test_registered_samplers_keep_the_contract(name):
    assert check_sampler(SAMPLERS[name]) == ALL
    assert sampler_name(build_sampler(name)) == name


@pytest.mark.parametrize(
    "make",
    [
        lambda: Variance(correct=True),
        lambda: Frontier(hard=2, easy=1, floor=0.005, bonus=0.5),
        lambda: SpoWeights(bonus=1.0),
        lambda: Thompson(target=0.0, explore=0.5),
        lambda: DropSolved(solved=0.5, floor=0.5),
        Harder,
    ],
)
def test_with_other_parameters_too(make):
    assert check_sampler(make) == ALL


@pytest.mark.parametrize(
    ("sampler", "formula"),
    [
        (Variance(), lambda v, variance: v * (1 - v) + 0.01),
        (Variance(bonus=2.0), lambda v, variance: v * (1 - v) + 0.01 + 2 * variance**0.5),
        (Frontier(), lambda v, variance: (1 - v) * v**0.5 + 0.02),
        (Frontier(hard=2, easy=1, floor=0.005), lambda v, variance: (1 - v) ** 2 * v + 0.005),
        (SpoWeights(), lambda v, variance: (v * (1 - v)) ** 0.5 + 0.05),
        (DropSolved(), lambda v, variance: 1.0 if v <= 0.9 else 0.02),
    ],
)
def test_weights_are_their_formula(sampler, formula):
    values = torch.linspace(0, 1, 16, dtype=torch.float64)
    variances = torch.rand(16, generator=generator(), dtype=torch.float64)
    expected = torch.tensor([formula(float(v), float(u)) for v, u in zip(values, variances, strict=True)]).double()
    torch.testing.assert_close(sampler.weights(values, variances), expected, rtol=1e-6, atol=1e-6)


def test_believed_values_count_on_the_scale_of_the_rewards():
    """The same belief in other units gives the same draw."""
    beliefs = example_beliefs()
    for name in ("variance", "frontier", "spo", "thompson", "drop_solved"):
        one = build_sampler(name).draw(IDS, beliefs["mixed"], 4, generator())
        other = build_sampler(name).draw(IDS, beliefs["rewards from -1 to 3"], 4, generator())
        assert one.rows.tolist() == other.rows.tolist()


def test_thompson_takes_the_nearest_of_its_draws():
    values = torch.linspace(0, 1, 16, dtype=torch.float64)
    rows = Thompson(target=0.4, explore=0.01).draw(IDS, ExampleBelief(values, torch.zeros(16)), 5, generator()).rows
    nearest = set((values - 0.4).abs().argsort()[:5].tolist())
    assert len(nearest & set(rows.tolist())) >= 4  # one of the five is anyone


def test_thompson_draws_with_the_standard_deviation_of_the_belief():
    """Uncertain prompts are drawn as often as in a plain loop over the same belief."""
    values = torch.cat([torch.full((8,), 0.9), torch.full((8,), 0.75)]).double()
    belief = ExampleBelief(values, torch.cat([torch.full((8,), 0.04), torch.zeros(8)]).double())
    drawn = [Thompson(target=1.0, explore=0.01).draw(IDS, belief, 4, generator(seed)).rows for seed in range(200)]
    share = float((torch.stack(drawn) < 8).double().mean())
    plain = []
    for seed in range(200):
        noise = torch.randn(16, generator=generator(1000 + seed), dtype=torch.float64)
        draws = torch.cat([values[:8] + 0.2 * noise[:8], values[8:]]).clamp(0, 1)
        distance = (draws - 1.0).abs()
        distance[torch.randint(16, (), generator=generator(seed))] = -1.0
        plain.append(float((distance.argsort()[:4] < 8).double().mean()))
    assert share == pytest.approx(sum(plain) / 200, abs=0.03)


def test_dynamic_keeps_groups_with_two_different_rewards():
    nan = torch.nan
    rewards = torch.tensor([[0, 1, 0], [1, 1, 1], [0, 0, nan], [nan, nan, nan], [nan, 0.5, 0.25]])
    assert Dynamic().keeps(rewards).tolist() == [True, False, False, False, True]
    assert Dynamic().keeps(torch.tensor([[nan, 1, 1], [-1, nan, -1]])).tolist() == [False, False]
    assert not Dynamic().in_dataset_order  # other prompts are drawn in place of refused ones, whatever the order
    assert Uniform().keeps(rewards).all()


def test_a_large_dataset_is_looked_at_in_part_with_the_right_ratio(monkeypatch):
    """Chances of both draws together: sums of ratios over many draws are those of a uniform draw."""
    monkeypatch.setattr("basis_rl.samplers.base.POOL", 8)
    values = torch.linspace(0, 1, 16, dtype=torch.float64)
    belief, looked = ExampleBelief(values, torch.zeros(16)), []

    class Counting(Variance):
        def weights(self, mean, variance):
            looked.append(len(mean))
            return super().weights(mean, variance)

    total = torch.zeros(16, dtype=torch.float64)
    for seed in range(4000):
        draw = Counting().draw(IDS, belief, 3, generator(seed))
        assert len(set(draw.rows.tolist())) == 3
        total[draw.rows] += draw.ratio
    assert set(looked) == {8}
    share = total / 4000 / (3 / 16)
    assert share.mean() == pytest.approx(1, abs=0.03)
    assert ((share - 1).abs() < 0.35).all()
    Counting().draw(IDS, belief, 12, generator())  # a batch that is larger than the part
    assert looked[-1] == 12


class Sevens(PromptSampler):
    """Breaks most promises."""

    known_chances = False
    correct = True

    def draw(self, candidates, belief, size, generator):
        return Draw(torch.zeros(size, dtype=torch.int64), torch.rand(size), {})


def but(kind, **parts):
    """A subclass of `kind` that breaks something."""
    return type("Broken", (kind,), parts)


def drawing(kind, change):
    """A subclass of `kind` that returns ``change(draw)``."""
    return but(kind, draw=lambda self, *args: change(kind.draw(self, *args)))


def weighing(weights):
    """A sampler whose weights are ``weights(mean)``."""
    return type("Weighing", (WeightedSampler,), {"weights": lambda self, mean, variance: weights(mean)})


Short = weighing(lambda mean: torch.ones(5))


class Global(Uniform):
    def draw(self, candidates, belief, size, generator):
        return super().draw(candidates, belief, size, torch.default_generator)


class Counting(Uniform):
    drawn = 0

    def draw(self, candidates, belief, size, generator):
        self.drawn += 1
        return Draw((super().draw(candidates, belief, size, generator).rows + self.drawn) % 16, torch.ones(size), {})


@pytest.fixture
def few_draws(monkeypatch):
    """What is broken shows in a fifth of the draws that the frequencies of a correct sampler are checked with."""
    monkeypatch.setattr("basis_rl.conformance.samplers._DRAWS", 300)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (Sevens, "did not draw 4 different prompts(.|\n)*does not use the generator(.|\n)*a ratio exactly where"),
        (weighing(lambda mean: (mean > 0.5).double()), "positive weight"),
        (drawing(Variance, lambda draw: replace(draw, ratio=torch.ones_like(draw.ratio))), "ratios that do not fit"),
        (Global, "other random numbers than the generator's"),
        (Counting, "changes its state in `draw`"),
        (Short, r"`weights` must return a tensor of shape \(16,\), and returned a tensor of shape \(5,\)"),
        (drawing(Variance, lambda draw: Draw(draw.rows.float(), None, {})), "int64 tensor, .* and type float32"),
        (drawing(Variance, lambda draw: replace(draw, ratio=draw.ratio * torch.nan)), "a ratio .* finite and > 0"),
        (lambda: type("Refilling", (Variance,), {"max_refills": 1})(correct=True), "correct = True and max_refills"),
        (
            but(Variance, keeps=lambda self, rewards: rewards[:, 0] > 1),
            "- keeps: refuses a group with different rewards",
        ),
        (lambda: 3, "builds an int, no subclass of basis_rl.samplers.PromptSampler"),
    ],
)
def test_what_is_broken_is_said(broken, said, few_draws):
    with pytest.raises(SamplerError, match=said):
        check_sampler(broken)


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("varianse", {}, "Did you mean 'variance'"),
        ("variance", {"flor": 1}, "Did you mean 'floor'"),
        ("dynamic", {"sampler": "dynamic"}, "Unknown sampler 'dynamic'"),
        ("dynamic", {"sampler": "thompson", "sampler_kwargs": {"targets": 1}}, "Did you mean 'target'"),
        ("tests.samplers.test_samplers:Anything", {"flor": 1}, "unexpected keyword argument 'flor'"),
        ("spo", {"clip": [2, 3]}, "least <= 1 <= largest"),
        ("tests.samplers.test_samplers:IDS", {}, "not a subclass of basis_rl.samplers.PromptSampler"),
        ("tests.samplers.test_samplers:Nobody", {}, "cannot be imported"),
    ],
)
def test_mistakes_are_one_message(name, params, said):
    with pytest.raises(ValueError, match=said):
        build_sampler(name, **params)


def test_a_draw_tells_what_share_is_believed_solved_and_impossible():
    values = torch.tensor([0.96] * 2 + [0.7] * 6 + [0.3] * 5 + [0.04] * 3, dtype=torch.float64)
    for sampler in (Variance(), Thompson()):
        metrics = sampler.draw(IDS, ExampleBelief(values, torch.zeros(16)), 4, generator()).metrics
        assert (metrics["believed_solved"], metrics["believed_impossible"]) == (2 / 16, 3 / 16)


class Anything(Variance):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def test_thompson_tells_how_many_prompts_it_chooses_from():
    """Its chances against frequencies of its draws."""
    values = torch.linspace(0, 1, 16, dtype=torch.float64)
    for spread in (0.0, 0.01, 0.09):
        belief, count, said = ExampleBelief(values, torch.full((16,), spread)), torch.zeros(16), 0.0
        for seed in range(500):
            draw = Thompson(target=0.2, explore=0.25).draw(IDS, belief, 4, generator(seed))
            count[draw.rows] += 1
            said += draw.metrics["effective_prompts"] / 500
        assert said == pytest.approx(float(count.sum() ** 2 / (count**2).sum()) / 16, abs=0.06)


def test_too_few_weights_in_the_part_that_is_looked_at_are_said_to_be_of_it(monkeypatch):
    monkeypatch.setattr("basis_rl.samplers.base.POOL", 8)
    few = weighing(lambda mean: torch.arange(len(mean)) < 3)
    with pytest.raises(ValueError, match=r"3 prompts have .* \(Each batch considers 8 of 16 prompts"):
        few().draw(IDS, ExampleBelief(torch.zeros(16), torch.zeros(16)), 4, generator())


def test_the_part_of_a_large_dataset_is_uniform(monkeypatch):
    """Also where it is not drawn from a permutation."""
    monkeypatch.setattr("basis_rl.samplers.base.POOL", 8)
    count = torch.zeros(40)
    for seed in range(1500):
        part = pool_indices(40, 3, generator(seed))
        assert len(set(part.tolist())) == 8
        assert torch.equal(part, part.sort().values)
        count[part] += 1
    assert ((count / 1500 / 0.2 - 1).abs() < 0.31).all()  # six standard deviations


def test_a_belief_that_is_no_belief_is_said():
    class Half(ExampleBelief):
        def believed(self, prompt_ids):
            mean, variance = super().believed(prompt_ids)
            return mean[:8], variance

    with pytest.raises(ValueError, match=r"`Half.believed` must return one finite mean for each of 16 .* \(8,\)"):
        Variance().draw(IDS, Half(torch.zeros(16), torch.zeros(16)), 4, generator())


@pytest.mark.parametrize("inner", [name for name in SAMPLERS if name != "dynamic"])
def test_any_sampler_draws_for_dynamic(inner):
    belief = ExampleBelief(torch.linspace(0, 1, 16).double(), torch.full((16,), 0.01).double())
    alone, within = build_sampler(inner), build_sampler("dynamic", sampler=inner)
    assert within.needs_belief == alone.needs_belief
    drawn = [each.draw(IDS, belief, 4, generator()).rows for each in (alone, within)]
    assert torch.equal(*drawn)
    assert within.keeps(torch.tensor([[0.0, 1.0], [1.0, 1.0]])).tolist() == [True, False]


def test_a_correction_within_dynamic_is_known_to_it():
    assert build_sampler("dynamic", sampler="frontier", sampler_kwargs={"correct": True}).correct
    assert not build_sampler("dynamic", sampler="frontier", sampler_kwargs={"floor": 0.1}).correct
