"""`check_baseline` notices each way to break the contract; what it asks for is not taken from the code it checks."""

from dataclasses import replace

import pytest
import torch

from basis_rl.baselines import BASELINES, Baseline, BaselineError, CenterScale, Ppo, Rloo, check_baseline
from basis_rl.baselines.base import check_state_keys, scorable_rows
from basis_rl.baselines.checks import example_batch
from basis_rl.types import Advantages, RolloutBatch
from tests.support.tiny import named_baseline, sums


class TokenValues(Baseline):
    """REINFORCE by token, correct; those below break it."""

    token_level = "always"

    def values(self, batch):
        scored = torch.nan_to_num(batch.rewards.double())[:, None]
        return scored * batch.action_mask

    def advantages(self, batch):
        values = self.values(batch)
        return Advantages(values=values, baseline=torch.zeros_like(values))


class InPadding(TokenValues):
    def values(self, batch):
        return torch.nan_to_num(batch.rewards.double())[:, None] * batch.action_mask.any(dim=1)[:, None] + torch.zeros(
            batch.action_mask.shape
        )


class ByWidth(TokenValues):
    def values(self, batch):
        return super().values(batch) / batch.action_mask.shape[1]


class ByColumn(TokenValues):
    """Aligns by column, so that padding on the left shifts it."""

    def values(self, batch):
        return super().values(batch) * (1.0 + torch.arange(batch.action_mask.shape[1]))


class SaysTooLittle(TokenValues):
    token_level = "never"


class SaysTooMuch(Rloo):
    token_level = "always"


class WithoutReward(Baseline):
    def advantages(self, batch):
        values = torch.nan_to_num(batch.rewards.double(), nan=-1.0) * batch.action_mask.any(dim=1)
        return Advantages(values=values, baseline=torch.zeros_like(values))


class WithoutAction(Baseline):
    def advantages(self, batch):
        values = torch.where(batch.rewards.isnan(), 0.0, 1.0 + torch.nan_to_num(batch.rewards.double()))
        return Advantages(values=values, baseline=torch.zeros_like(values))


class DeafToKl(Rloo):
    def advantages(self, batch):
        return super().advantages(replace(batch, kl=None))


class Writes(TokenValues):
    def values(self, batch):
        values = super().values(batch)
        batch.rewards[batch.rewards.isnan()] = 0.0
        return values


class AloneInItsGroup(Rloo):
    def advantages(self, batch):
        values = torch.nan_to_num(batch.rewards.double()) * batch.action_mask.any(dim=1)
        return Advantages(values=values, baseline=torch.zeros_like(values))


class ByGroupNumber(TokenValues):
    def values(self, batch):
        return super().values(batch) * (1.0 + batch.group_ids[:, None])


class NoGradient(Ppo):
    def loss(self, predicted, batch):
        found = super().loss(predicted, batch)
        return replace(found, per_token=found.per_token.detach() + 0.0 * predicted)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (SaysTooLittle, "says token_level = 'never', but returns advantages of tokens"),
        (SaysTooMuch, "says token_level = 'always', but returns advantages of rollouts"),
        (InPadding, "0 where the reward is NaN or the mask is 0"),
        (ByWidth, "depends on how far the batch is padded"),
        (ByColumn, "depends on how far the batch is padded"),
        (WithoutReward, "0 where the reward is NaN or the mask is 0"),
        (WithoutAction, "0 where the reward is NaN or the mask is 0"),
        (DeafToKl, "does not change its advantages"),
        (Writes, "writes into the batch's `rewards`"),
        (AloneInItsGroup, "to the only scored rollout of a group"),
        (ByGroupNumber, "depends on the numbers in `group_ids`"),
        (NoGradient, "a loss whose gradient is 0 everywhere"),
    ],
)
def test_what_is_broken_is_told(broken, message):
    with pytest.raises(BaselineError, match=message):
        check_baseline(broken)


def test_the_example_that_they_break_conforms():
    assert {"padding", "shape_and_zeros", "token_level"} <= set(check_baseline(TokenValues))


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


class WithState(Rloo):
    """Remembers one number, correct; those below break it."""

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


class TurnsNan(WithState):
    def learnt(self, batch):
        return self.seen + float(batch.rewards.nanmean())  # NaN where no rollout has a reward


class SilentAfterwards(WithState):
    def changed(self, values):
        return values * (self.seen == 0)


class LearnsTheFirstRow(WithState):
    def learnt(self, batch):
        return float(batch.rewards.nan_to_num() @ torch.arange(len(batch.rewards)).float())


class OwnRewardAfterwards(WithState):
    def advantages(self, batch):
        found = super().advantages(batch)
        own = torch.nan_to_num(batch.rewards.double()) * (self.seen != 0)
        return replace(found, baseline=found.baseline + own)


class Flipped(Rloo):
    def advantages(self, batch):
        found = super().advantages(batch)
        return replace(found, values=-found.values)


class NegativeFails(Rloo):
    def advantages(self, batch):
        found = super().advantages(batch)
        root = torch.nan_to_num(batch.rewards).sqrt()
        return replace(found, values=torch.where(found.values != 0, root.double(), found.values))


class NoAdvantages(Rloo):
    def advantages(self, batch):
        return super().advantages(batch).values


class Undeclared(Rloo):
    def advantages(self, batch):
        return Advantages(values=batch.energies.sum(dim=1), baseline=batch.rewards)


class AsksForMore(Rloo):
    requires = frozenset({"hidden_states"})


class Several(Rloo):
    token_level = "always"
    uses_own_reward = False

    def advantages(self, batch):
        values = -torch.nan_to_num(batch.rewards.double()) * batch.action_mask.any(dim=1)
        return Advantages(values=values, baseline=torch.nan_to_num(batch.rewards))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (TurnsNan, "values that are not finite.*after some batches"),
        (SilentAfterwards, "nothing would be learnt.*after some batches"),
        (LearnsTheFirstRow, "learns something else in `update` from the same rows in another order"),
        (OwnRewardAfterwards, "depends on the own reward.*after some batches"),
        (Flipped, "lowers the advantage of a rollout for a higher reward"),
        (NegativeFails, "not finite.*rewards between -1 and 1"),
        (NoAdvantages, "returns a Tensor from `advantages`, not Advantages"),
        (Undeclared, "raises AttributeError.*only if `requires` names them"),
        (AsksForMore, r"requires \['hidden_states'\]; a batch can have"),
        (lambda: 3, "builds a int, no subclass"),
        (torch.zeros(2), "A Tensor is not a baseline"),
        (None, "A NoneType is not a baseline"),
        (lambda needed: Rloo(), "cannot be built: TypeError"),
    ],
)
def test_what_is_broken_later_or_from_the_start(broken, message):
    with pytest.raises(BaselineError, match=f"(?s){message}"):
        check_baseline(broken)


def test_the_stateful_example_conforms_as_an_object_too():
    assert check_baseline(WithState()) == check_baseline(WithState)


def test_every_broken_promise_is_told():
    with pytest.raises(BaselineError) as told:
        check_baseline(Several)
    for promise in ("token_level", "one_scored_row", "own_reward", "sign", "kl_in_the_reward"):
        assert f"- {promise}: " in str(told.value)
