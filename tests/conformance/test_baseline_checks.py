"""`check_baseline` notices each way to break the contract; what it asks for is not taken from the code it checks."""

import functools
import math
import re
import threading
from dataclasses import replace

import pytest
import torch

from basis_rl.baselines import BASELINES, Baseline, CenterScale, Gdpo, Ppo, Rloo
from basis_rl.baselines.base import check_state_keys, scorable_rows
from basis_rl.conformance import BaselineError, check_baseline
from basis_rl.conformance.baselines import example_batch
from basis_rl.types import Advantages, RolloutBatch
from tests.support.tiny import named_baseline, sums


class TokenValues(Baseline):
    """REINFORCE by token, correct."""

    token_level = "always"

    def values(self, batch):
        scored = torch.nan_to_num(batch.rewards.double())[:, None]
        return scored * batch.action_mask

    def advantages(self, batch):
        values = self.values(batch)
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
        return replace(found, values=self.changed(found.values), baseline=found.baseline)

    def changed(self, values):
        return values * (1.0 + abs(self.seen))

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        check_state_keys(self, state, ("seen",))
        self.seen = state["seen"]


class Shifts(WithState):
    """The state moves the baseline."""

    def changed(self, values):
        return torch.where(values != 0, values - self.seen, 0.0)

    def learnt(self, batch):
        scored = batch.rewards[~batch.rewards.isnan()]
        return self.of_scored(scored) if len(scored) else self.seen


def but(kind, **parts):
    """A subclass of `kind` that breaks something."""
    return type("Broken", (kind,), parts)


def values_but(change):
    """`TokenValues` whose values are ``change(values, batch)``."""
    return but(TokenValues, values=lambda self, batch: change(TokenValues.values(self, batch), batch))


def rloo_but(change, **parts):
    """`Rloo` that returns ``change(advantages, batch)``."""
    return but(Rloo, advantages=lambda self, batch: change(Rloo.advantages(self, batch), batch), **parts)


def only(values):
    """A baseline that returns ``values(batch)``, with a baseline of 0."""

    def advantages(self, batch):
        found = values(batch)
        return Advantages(values=found, baseline=torch.zeros_like(found))

    return but(Baseline, advantages=advantages)


def rewards_of(batch, nan=0.0):
    return torch.nan_to_num(batch.rewards.double(), nan=nan)


def flipped(when):
    """Advantages with the wrong sign, when ``when(rewards)`` holds for one of them."""
    return rloo_but(lambda found, batch: replace(found, values=-found.values if when(batch) else found.values))


def without_reward(batch):
    return rewards_of(batch, nan=-1.0) * batch.action_mask.any(dim=1)


def without_eps(batch):
    rows = scorable_rows(batch)
    values = torch.zeros(len(rows))
    if int(rows.sum()) > 1:
        scored = batch.rewards[rows]
        values[rows] = (scored - scored.mean()) / scored.std()
    return values


def writing(values, batch):
    batch.rewards[batch.rewards.isnan()] = 0.0
    return values


def root_if_learning(found, batch):
    root = torch.nan_to_num(batch.rewards).sqrt()
    return replace(found, values=torch.where(found.values != 0, root.double(), found.values))


class HiddenOwnReward(CenterScale):
    def center(self, rewards, group_ids):
        return 0.5 * rewards


class NoTokensWithKl(CenterScale):
    token_level = "with_kl"

    def center(self, rewards, group_ids):
        return torch.zeros_like(rewards)


class OwnRewardAfterwards(WithState):
    def advantages(self, batch):
        found = super().advantages(batch)
        return replace(found, baseline=found.baseline + rewards_of(batch) * (self.seen != 0))


class ForgetsState(WithState):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        check_state_keys(self, state, ())


class CountsCalls(WithState):
    def advantages(self, batch):
        self.seen += 1
        return super().advantages(batch)


class DividesByTheLastDeviation(WithState):
    seen = 1.0

    def learnt(self, batch):
        scored = batch.rewards[~batch.rewards.isnan()]
        return float(scored.std()) if len(scored) > 1 else self.seen

    def changed(self, values):
        return values / self.seen


class SortsPrompts(Rloo):
    def advantages(self, batch):
        batch.prompt_ids.sort()
        return super().advantages(batch)


class ScalesWeights(Gdpo):
    def advantages(self, batch):
        batch.reward_weights.mul_(2)
        return super().advantages(batch)


class Raises(Rloo):
    def update(self, batch):
        raise KeyError("x")


class Exits(Rloo):
    def advantages(self, batch):
        raise SystemExit(3)


def loss_but(change):
    """`Ppo` whose loss is ``change(loss, predicted)``."""
    return but(Ppo, loss=lambda self, predicted, batch: change(Ppo.loss(self, predicted, batch), predicted))


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
        (but(TokenValues, token_level="never"), "says token_level = 'never', but returns advantages of tokens without"),
        (but(Rloo, token_level="always"), "says token_level = 'always', but returns advantages of rollouts"),
        (but(Ppo, token_level="with_kl"), "says token_level = 'with_kl', but returns advantages of tokens without KL"),
        (NoTokensWithKl, "says token_level = 'with_kl', but returns advantages of rollouts with KL in the reward"),
        (values_but(lambda v, batch: v / batch.action_mask.shape[1]), "depends on how far the batch is padded"),
        (values_but(lambda v, batch: v * (1.0 + torch.arange(v.shape[1]))), "depends on how far the batch is padded"),
        (values_but(lambda v, batch: v * (1.0 + batch.group_ids[:, None])), "depends on the numbers in `group_ids`"),
        (only(lambda batch: rewards_of(batch) * torch.arange(len(batch.rewards)) ** 0), ZERO),
        (only(without_reward), ZERO),
        (but(Rloo, advantages=lambda self, batch: Rloo.advantages(self, replace(batch, kl=None))), "does not change"),
        (
            but(Rloo, advantages=only(lambda b: rewards_of(b) * b.action_mask.any(dim=1)).advantages),
            "to the only scored",
        ),
        (
            loss_but(lambda loss, p: replace(loss, per_token=loss.per_token.detach() + 0.0 * p)),
            "gradient is 0 everywhere",
        ),
        (
            loss_but(lambda loss, p: replace(loss, counts=torch.ones_like(loss.counts))),
            "learns from tokens that are not",
        ),
        (
            loss_but(lambda loss, p: replace(loss, per_token=loss.per_token - (p * loss.counts).mean())),
            "a loss of a rollout that depends on which others are there",
        ),
        (HiddenOwnReward, "depends on the own reward"),
        (OwnRewardAfterwards, "depends on the own reward.*after some batches"),
        (
            rloo_but(lambda found, batch: replace(found, baseline=found.baseline + 1e-9 * torch.randn(()))),
            "no_side_effect: gives other advantages when it is given the same batch again",
        ),
        (CountsCalls, "changes its state in `advantages`"),
        (ForgetsState, "does not come back the same"),
        (but(Rloo, load_state_dict=lambda self, state: None), "without a ValueError"),
        (but(WithState, changed=lambda self, values: values * (self.seen == 0)), SILENT + r" \(after some batches"),
        (
            but(WithState, learnt=lambda self, b: self.seen + float(b.rewards.nanmean())),
            "not finite.*after some batches",
        ),
        (
            but(WithState, learnt=lambda self, b: float(rewards_of(b) @ torch.arange(len(b.rewards)).double())),
            UNORDERED,
        ),
        (rloo_but(root_if_learning), "not finite.*rewards between -1 and 1"),
        (only(lambda batch: batch.energies.sum(dim=1)), "raises AttributeError.*only if `requires` names them"),
    ],
)
def test_what_is_broken_is_told(broken, message):
    with pytest.raises(BaselineError, match=f"(?s){message}"):
        check_baseline(broken)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (flipped(lambda batch: True), SIGN + "$"),
        (flipped(lambda b: ((b.rewards > 0) & (b.rewards < 1)).any()), SIGN + r" \(rewards between 0 and 1\)$"),
        (
            flipped(lambda b: (b.rewards < 0).any()),
            SIGN + r" \(after some batches, rewards between -1 and 1\)$",
        ),
        (only(lambda b: rewards_of(b) * (b.rewards == 1) * b.action_mask.any(dim=1)), SILENT + r" \(rewards between 0"),
        (only(lambda batch: torch.zeros(len(batch.rewards))), SILENT + "$"),
        (but(Shifts, of_scored=lambda self, scored: float(scored[0])), UNORDERED),
        (but(Shifts, of_scored=lambda self, scored: float(scored[-1])), UNORDERED),
        (but(only(without_eps), uses_own_reward=True), NOT_FINITE + " when all rewards are equal"),
        (DividesByTheLastDeviation, NOT_FINITE + " after a batch in which all rewards are equal"),
        (
            but(
                WithState,
                learnt=lambda self, batch: self.seen + float(batch.rewards.mean()),
                changed=lambda self, values: values,
            ),
            "- finite_state: has a state that turns NaN in `update`: seen",
        ),
        (SortsPrompts, "- no_side_effect: writes into the batch's `prompt_ids`$"),
        (ScalesWeights, "- no_side_effect: writes into the batch's `reward_weights`$"),
        (but(Rloo, update=lambda self, batch: batch.rewards.zero_()), "writes into the batch's `rewards` in `update`$"),
        (values_but(writing), "writes into the batch's `rewards`"),
        (
            rloo_but(lambda found, batch: replace(found, metrics={"mean": float(batch.rewards.mean())})),
            r"returns metrics that are not finite: \['mean'\]",
        ),
        (
            rloo_but(lambda found, batch: replace(found, metrics=None)),
            "returns metrics that are a NoneType, not a dict$",
        ),
        (
            rloo_but(lambda found, batch: replace(found, values=found.values.clone().requires_grad_())),
            "returns values that require a gradient",
        ),
        (but(Rloo, min_group_size=0), "- declarations: says min_group_size = 0, not a whole number of at least 1$"),
        (
            but(Rloo, token_level="sometimes"),
            "- declarations: says token_level = 'sometimes', not one of never, with_kl",
        ),
        (but(Rloo, requires=frozenset({"hidden_states"})), r"requires \['hidden_states'\]; a batch can have"),
        (but(Rloo, requires=frozenset({"values"})), r"requires \['values'\], which .* `LearnedBaseline` only$"),
        (but(Rloo, requires=frozenset({"kl"})), r"requires \['kl'\]; .*say `reads_kl = True` for KL\)$"),
        (but(Rloo, requires="energies"), "- declarations: says requires = 'energies', not a set of names"),
        (but(Rloo, uses_own_reward="yes"), "- declarations: says uses_own_reward = 'yes', not True or False$"),
        (rloo_but(lambda found, batch: found.values), "returns a Tensor from `advantages`, not Advantages$"),
        (state_of(None), "returns a NoneType from `state_dict`, not a dict$"),
        (state_of({"a": lambda: 1}), "has a state that cannot be saved: "),
        (state_of({"a": threading}), "has a state that cannot be saved: "),
        (state_of({"a": functools.partial(math.sqrt, 2.0)}), "has a state with more in it than tensors"),
        (Raises, r"raises KeyError: 'x' in `update` \(test_baseline_checks.py, line \d+\) \(after some batches\)$"),
        (Exits, r"raises SystemExit: 3 in `advantages` \(test_baseline_checks.py, line \d+\)$"),
    ],
)
def test_one_cause_is_told_once(broken, message):
    with pytest.raises(BaselineError) as told:
        check_baseline(broken)
    first, *causes = str(told.value).splitlines()
    assert first == f"{broken.__name__} breaks a promise of a baseline:"
    assert len(causes) == 1
    assert re.search(message, causes[0]), causes[0]


class Several(Rloo):
    token_level = "always"
    uses_own_reward = False

    def advantages(self, batch):
        values = -torch.nan_to_num(batch.rewards.double()) * batch.action_mask.any(dim=1)
        return Advantages(values=values, baseline=torch.nan_to_num(batch.rewards))


class RaisesAndByPosition(Rloo):
    def advantages(self, batch):
        if bool(batch.rewards.isnan().all()):
            raise ZeroDivisionError("division by zero")
        found = super().advantages(batch)
        return replace(found, values=found.values * torch.arange(len(found.values)))


class RootOfTheMean(Shifts):
    def of_scored(self, scored):
        return 0.5 * self.seen + 0.5 * float(scored.mean().sqrt())


@pytest.mark.parametrize(
    ("broken", "promises"),
    [
        (Several, {"token_level", "one_scored_row", "own_reward", "sign", "kl_in_the_reward"}),
        (RaisesAndByPosition, {"all_unscored", "row_order"}),
        (RootOfTheMean, {"shape_and_zeros", "finite_state"}),
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


class Locked(Rloo):
    def __init__(self):
        self.lock = threading.Lock()


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


class UnreadableValues(Rloo):
    @property
    def values(self):
        raise RuntimeError("not loaded")


def test_what_conforms_does_so_in_every_form():
    passed = check_baseline(TokenValues)
    assert len(passed) == 17
    kinds = (WithState, WithState(), UnreadableValues, Locked, functools.partial(needs, 1.0))
    assert all(check_baseline(kind) == passed for kind in kinds)


@pytest.mark.parametrize("name", BASELINES)
def test_no_advantage_without_a_reward_or_a_token(name):
    """Which rows these are is told by a loop over the batch."""
    ids = list(sums()["prompt_id"])[:6]
    baseline = named_baseline(name, sums())
    batch = example_batch(baseline, ids)
    values = baseline.advantages(batch).values
    silent = 0
    for row, (reward, mask) in enumerate(zip(batch.rewards.tolist(), batch.action_mask.tolist(), strict=True)):
        for column, action in enumerate(mask):
            if reward != reward or not any(mask) or (values.ndim == 2 and not action):
                silent += 1
                assert float(values[row] if values.ndim == 1 else values[row, column]) == 0.0
    assert silent > 0
    assert (values != 0).any() or name == "bv_blend"  # which knows nothing yet at one rollout per prompt


def small(rewards, mask, groups):
    return RolloutBatch(
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor(groups),
        prompt_ids=[f"p{g}" for g in groups],
        action_mask=torch.tensor(mask).bool(),
    )


def test_rows_that_count_have_a_reward_and_a_token():
    batch = small([1.0, torch.nan, 0.0, torch.nan], [[1, 0], [1, 1], [0, 0], [0, 0]], [0, 0, 1, 1])
    assert scorable_rows(batch).tolist() == [True, False, False, False]


class AgainstTheBatch(CenterScale):
    """Needs two of a group, though its center is that of the batch."""

    min_group_size = 2

    def center(self, rewards, group_ids):
        return torch.full_like(rewards, float(rewards.nanmean()))


def test_a_group_that_is_too_small_has_no_advantage_whatever_its_center():
    batch = small([1.0, torch.nan, 0.0, 0.0], [[1], [1], [1], [1]], [0, 0, 1, 1])
    result = AgainstTheBatch().advantages(batch)
    assert result.values.tolist() == pytest.approx([0.0, 0.0, -1 / 3, -1 / 3])
    assert result.metrics["undefined"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("state", "message"), [({}, r"missing keys \['a'\]"), ({"a": 1, "b": 2}, r"unexpected .*'b'")])
def test_states_are_loaded_strictly(state, message):
    with pytest.raises(ValueError, match=message):
        check_state_keys(Rloo(), state, ("a",))
