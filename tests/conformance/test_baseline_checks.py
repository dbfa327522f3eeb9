"""`check_baseline` notices each way to break the contract; what it asks for is not taken from the code it checks."""

import functools
import math
import re
import threading
from dataclasses import replace

import pytest
import torch

from basis_rl.baselines import Baseline, BasisHistory, CenterScale, Gdpo, Ppo, Rloo
from basis_rl.baselines.base import check_state_keys, scorable_rows
from basis_rl.conformance import BaselineError, check_baseline
from basis_rl.types import Advantages
from tests.support.batches import batch_of


def rewards_of(batch, nan=0.0):
    return torch.nan_to_num(batch.rewards.double(), nan=nan)


class TokenValues(Baseline):
    """REINFORCE by token, correct."""

    token_level = "always"

    def advantages(self, batch):
        values = rewards_of(batch)[:, None] * batch.action_mask
        return Advantages(values=values, baseline=torch.zeros_like(values))


class WithState(Rloo):
    """Remembers one number, correct."""

    seen = 0.0

    def update(self, batch):
        self.seen = self.learnt(batch)

    def learnt(self, batch):
        return float(batch.rewards.nansum())

    def advantages(self, batch):
        found = super().advantages(batch)
        return replace(found, values=self.changed(found.values))

    def changed(self, values):
        return values * (1.0 + abs(self.seen))

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        check_state_keys(self, state, ("seen",))
        self.seen = state["seen"]


class OfText(BasisHistory):
    """Starts at the texts of the prompts, correct."""

    def __init__(self):
        super().__init__(prior="text")


def but(kind, **parts):
    """A subclass of `kind` that breaks something."""
    return type("Broken", (kind,), parts)


def learning(of_scored, least=1, **parts):
    """A state that is ``of_scored(self, scored rewards)`` where there are at least so many."""

    def learnt(self, batch):
        scored = batch.rewards[~batch.rewards.isnan()]
        return float(of_scored(self, scored)) if len(scored) >= least else self.seen

    return but(WithState, learnt=learnt, **parts)


def shifts(of_scored):
    """The state moves the baseline."""
    return learning(of_scored, changed=lambda self, values: torch.where(values != 0, values - self.seen, 0.0))


def before(kind, act):
    """Calls ``act(self, batch)`` before it computes advantages."""

    def advantages(self, batch):
        act(self, batch)
        return kind.advantages(self, batch)

    return but(kind, advantages=advantages)


def centered(center, **parts):
    """``r - center(r)``, whatever the groups."""
    return but(CenterScale, center=lambda self, rewards, group_ids: center(rewards), **parts)


class Locked(Rloo):
    def __init__(self):
        self.lock = threading.Lock()


def only(values, **parts):
    """A baseline that returns ``values(batch)``, with a baseline of 0."""

    def advantages(self, batch):
        found = values(batch)
        return Advantages(values=found, baseline=torch.zeros_like(found))

    return but(Baseline, advantages=advantages, **parts)


def returning(kind=Rloo, **changes):
    """`kind` whose advantages have each named part replaced by ``change(advantages, batch)``."""

    def advantages(self, batch):
        found = kind.advantages(self, batch)
        return replace(found, **{name: change(found, batch) for name, change in changes.items()})

    return but(kind, advantages=advantages)


def values_but(change, kind=TokenValues):
    """`kind` whose values are ``change(values, batch)``."""
    return returning(kind, values=lambda found, batch: change(found.values, batch))


def flipped(when):
    """Advantages with the wrong sign, when ``when(rewards)`` holds for one of them."""
    return values_but(lambda values, batch: -values if when(batch.rewards).any() else values, Rloo)


def reporting(more, kind=Rloo):
    """`kind` that reports a baseline that is larger by ``more(self, batch)``."""

    def advantages(self, batch):
        found = kind.advantages(self, batch)
        return replace(found, baseline=found.baseline + more(self, batch))

    return but(kind, advantages=advantages)


def loss_but(change):
    """`Ppo` whose loss has the parts that ``change(loss, predicted)`` names."""

    def loss(self, predicted, batch):
        found = Ppo.loss(self, predicted, batch)
        return replace(found, **change(found, predicted))

    return but(Ppo, loss=loss)


def reward_alone(batch):
    return rewards_of(batch) * batch.action_mask.any(dim=1)


def without_eps(batch):
    rows = scorable_rows(batch)
    values = torch.zeros(len(rows))
    if int(rows.sum()) > 1:
        scored = batch.rewards[rows]
        values[rows] = (scored - scored.mean()) / scored.std()
    return values


class Raises(Rloo):
    def update(self, batch):
        raise KeyError("x")


class Exits(Rloo):
    def advantages(self, batch):
        raise SystemExit(3)


def state_of(value):
    return but(Rloo, state_dict=lambda self: value)


SIGN = r"- sign: lowers the advantage .*is it b - r\?\)"
SILENT = "- sign: .*nothing would be learnt"
UNORDERED = "- row_order_of_update: learns something else in `update`"
ZERO = "- shape_and_zeros: .*0 where the reward is NaN or the mask is 0"
NOT_FINITE = "- equal_rewards: .*not finite"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (but(TokenValues, token_level="never"), "'never', but returns advantages of tokens"),
        (but(Ppo, token_level="with_kl"), "'with_kl', but returns advantages of tokens without KL"),
        (centered(torch.zeros_like, token_level="with_kl"), "'with_kl', but returns advantages of rollouts with KL"),
        (values_but(lambda v, batch: v / batch.action_mask.shape[1]), "how far the batch is padded"),
        (values_but(lambda v, batch: v * (1.0 + batch.group_ids[:, None])), "the numbers in `group_ids`"),
        (only(lambda batch: rewards_of(batch, nan=-1.0) * batch.action_mask.any(dim=1)), ZERO),
        (but(Rloo, advantages=lambda self, batch: Rloo.advantages(self, replace(batch, kl=None))), "does not change"),
        (but(Rloo, advantages=only(reward_alone).advantages), "to the only scored"),
        (loss_but(lambda loss, p: {"per_token": loss.per_token.detach() + 0.0 * p}), "gradient is 0 everywhere"),
        (loss_but(lambda loss, p: {"counts": torch.ones_like(loss.counts)}), "learns from tokens that are not"),
        (loss_but(lambda loss, p: {"per_token": loss.per_token - (p * loss.counts).mean()}), "which others are there"),
        (centered(lambda rewards: 0.5 * rewards), "depends on the own reward"),
        (
            reporting(lambda self, batch: rewards_of(batch) * (self.seen != 0), WithState),
            "depends on the own reward.*after some batches",
        ),
        (reporting(lambda self, batch: 1e-9 * torch.randn(())), "no_side_effect: gives other advantages when .* again"),
        (before(WithState, lambda self, batch: setattr(self, "seen", self.seen + 1)), "its state in `advantages`"),
        (
            but(WithState, state_dict=lambda self: {}, load_state_dict=lambda self, s: check_state_keys(self, s, ())),
            "does not come back the same",
        ),
        (but(Rloo, load_state_dict=lambda self, state: None), "without a ValueError"),
        (but(WithState, changed=lambda self, values: values * (self.seen == 0)), SILENT + r" \(after some batches"),
        (but(WithState, learnt=lambda self, b: self.seen + float(b.rewards.nanmean())), "not finite.*after some"),
        (
            values_but(lambda v, batch: torch.where(v != 0, batch.rewards.nan_to_num().sqrt().double(), v), Rloo),
            "not finite.*rewards between -1 and 1",
        ),
        (only(lambda batch: batch.energies.sum(dim=1)), "raises AttributeError.*only if `requires` names them"),
    ],
)
def test_what_is_broken_is_told(broken, message):
    with pytest.raises(BaselineError, match=f"(?s){message}"):
        check_baseline(broken)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (flipped(lambda rewards: rewards == rewards), SIGN + "$"),
        (flipped(lambda rewards: (rewards > 0) & (rewards < 1)), SIGN + r" \(rewards between 0 and 1\)$"),
        (flipped(lambda rewards: rewards < 0), SIGN + r" \(after some batches, rewards between -1 and 1\)$"),
        (only(lambda batch: reward_alone(batch) * (batch.rewards == 1)), SILENT + r" \(rewards between 0"),
        (only(lambda batch: torch.zeros(len(batch.rewards))), SILENT + "$"),
        (shifts(lambda self, scored: scored[0]), UNORDERED),
        (shifts(lambda self, scored: scored[-1]), UNORDERED),
        (only(without_eps, uses_own_reward=True), NOT_FINITE + " when all rewards are equal"),
        (
            learning(lambda self, xs: xs.std(), least=2, seen=1.0, changed=lambda self, values: values / self.seen),
            NOT_FINITE + " after a batch in which all rewards are equal",
        ),
        (
            before(but(Rloo, learns_from=frozenset({"gradient_energies"})), lambda self, b: b.gradient_energies.sum()),
            "raises AttributeError: 'NoneType' object has no attribute 'sum'",
        ),
        (
            before(
                OfText,
                lambda self, batch: self.text_prior.know(dict(zip(batch.prompt_ids, batch.prompt_texts, strict=True))),
            ),
            "- no_side_effect: changes in `advantages` what it believes .*$",
        ),
        (
            before(Rloo, lambda self, batch: batch.prompt_ids.sort()),
            "writes into the `prompt_ids` that it is",
        ),
        (
            before(Gdpo, lambda self, batch: batch.reward_weights.mul_(2)),
            "writes into the `reward_weights` that",
        ),
        (
            but(Rloo, update=lambda self, batch: batch.rewards.zero_()),
            "`rewards` that it is given in `update`$",
        ),
        (values_but(lambda values, batch: 1e4 * values, Rloo), "- bounded: .* more than 1,000 times"),
        (returning(metrics=lambda f, b: {"mean": float(b.rewards.mean())}), r"metrics .* finite numbers: \['mean'\]"),
        (returning(metrics=lambda found, batch: None), "returns metrics that are a NoneType, not a dict$"),
        (returning(values=lambda found, _: found.values.clone().requires_grad_()), "values that require a gradient"),
        (
            but(Rloo, requires=frozenset({"turn_rewards"})),
            "- turn_rewards: requires `turn_rewards`, but does not use them$",
        ),
        (
            returning(values=lambda found, batch: found.values * (1.0 + (batch.turn_rewards is not None))),
            "- turn_rewards: reads `turn_rewards`, which it does not require$",
        ),
        (
            but(
                values_but(lambda values, batch: values * (1.0 if batch.turn_rewards is None else 2.0)),
                requires=frozenset({"turn_rewards"}),
            ),
            "- turn_rewards: gives other advantages if the whole reward is said to be that of the last turn$",
        ),
        (but(Rloo, min_group_size=0), "- declarations: says min_group_size = 0, not a whole number of at least 1$"),
        (but(Rloo, token_level="sometimes"), "- declarations: .* 'sometimes', not one of never, with_kl"),
        (but(Rloo, requires=frozenset({"values"})), r"requires \['values'\], which .* `LearnedBaseline` only$"),
        (but(Rloo, requires=frozenset({"kl"})), r"requires \['kl'\]; .*say `reads_kl = True` for KL\)$"),
        (
            but(
                Rloo,
                requires=frozenset({"energies"}),
                reward_range=(0.0, 1.0),
                believed=lambda self, prompt_ids: (torch.zeros(len(prompt_ids)),) * 2,
                update=lambda self, batch: batch.energies.sum(),
            ),
            "- discarded_groups: raises AttributeError: 'NoneType' object has no attribute 'sum'",
        ),
        (but(Rloo, requires="energies"), "- declarations: says requires = 'energies', not a set of names"),
        (
            but(Rloo, advantages=lambda self, batch: batch.rewards),
            "a Tensor from `advantages`, not Advantages$",
        ),
        (state_of(None), "returns a NoneType from `state_dict`, not a dict$"),
        (state_of({"a": lambda: 1}), "has a state that cannot be saved: "),
        (state_of({"a": functools.partial(math.sqrt, 2.0)}), "has a state with more in it than tensors"),
        (Raises, r"KeyError: 'x' in `update` \(test_baseline_checks.py, line \d+\) \(after some batches\)$"),
        (Exits, r"SystemExit: 3 in `advantages` \(test_baseline_checks.py, line \d+\)$"),
    ],
)
def test_one_cause_is_told_once(broken, message):
    with pytest.raises(BaselineError) as told:
        check_baseline(broken)
    first, *causes = str(told.value).splitlines()
    assert first == f"{broken.__name__} breaks a promise of a baseline:"
    assert len(causes) == 1
    assert re.search(message, causes[0]), causes[0]


def several(self, batch):
    return Advantages(values=-reward_alone(batch), baseline=rewards_of(batch))


def by_position(values, batch):
    if bool(batch.rewards.isnan().all()):
        raise ZeroDivisionError("division by zero")
    return values * torch.arange(len(values))


@pytest.mark.parametrize(
    ("broken", "promises"),
    [
        (
            but(Rloo, token_level="always", advantages=several),
            {"token_level", "one_scored_row", "own_reward", "sign", "kl_in_the_reward"},
        ),
        (values_but(by_position, Rloo), {"all_unscored", "row_order"}),
    ],
)
def test_every_broken_promise_is_told(broken, promises):
    with pytest.raises(BaselineError) as told:
        check_baseline(broken)
    assert promises <= set(re.findall(r"^- (\w+): ", str(told.value), re.M))


def once():
    """A factory that works one time."""
    built = []

    def build():
        if built:
            raise OSError("file in use")
        built.append(1)
        return Rloo()

    return build


def needs(strength):
    return Rloo()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: 3, "builds an int, no subclass"),
        (torch.zeros(2), "a Tensor, not a baseline"),
        (3, "an int, not a baseline"),
        (needs, "needs cannot be built: TypeError"),
        (functools.partial(needs, wrong=1), "needs cannot be built: TypeError"),
        (Locked(), "Locked cannot be copied: TypeError: .*lock.*Give its class, or a function that builds it"),
        (once(), "build cannot be built again: OSError: file in use"),
    ],
)
def test_what_cannot_be_built_is_one_message(broken, message):
    with pytest.raises(BaselineError, match=message):
        check_baseline(broken)


def test_what_conforms_does_so_in_every_form():
    passed = check_baseline(TokenValues)
    assert len(passed) == 19
    kinds = (WithState, WithState(), Locked, functools.partial(needs, 1.0))
    assert all(check_baseline(kind) == passed for kind in kinds)


def test_a_group_that_is_too_small_has_no_advantage_whatever_its_center():
    kind = centered(lambda rewards: torch.full_like(rewards, float(rewards.nanmean())), min_group_size=2)
    result = kind().advantages(batch_of([1.0, torch.nan, 0.0, 0.0], groups=[0, 0, 1, 1]))
    assert result.values.tolist() == pytest.approx([0.0, 0.0, -1 / 3, -1 / 3])
    assert result.metrics["undefined"] == pytest.approx(1 / 3)
