"""`check_baseline` notices each way to break the contract; what it asks for is not taken from the code it checks."""

import functools
import math
import re
import threading
from dataclasses import replace

import pytest
import torch

from basis_rl.baselines import (
    BASELINES,
    Baseline,
    CenterScale,
    Gdpo,
    Ppo,
    Rloo,
)
from basis_rl.baselines.base import check_state_keys, scorable_rows
from basis_rl.conformance import BaselineError, check_baseline
from basis_rl.conformance.baselines import example_batch
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
        (lambda: 3, "builds an int, no subclass"),
        (torch.zeros(2), "A Tensor is not a baseline"),
        (None, "A NoneType is not a baseline"),
        (3, "An int is not a baseline"),
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


class FlippedIfGraded(Rloo):
    def advantages(self, batch):
        found = super().advantages(batch)
        rewards = batch.rewards.nan_to_num()
        return replace(found, values=-found.values if bool(((rewards > 0) & (rewards < 1)).any()) else found.values)


class FlippedIfNegative(Rloo):
    def advantages(self, batch):
        found = super().advantages(batch)
        return replace(found, values=-found.values if bool((batch.rewards < 0).any()) else found.values)


class SilentIfGraded(Baseline):
    def advantages(self, batch):
        rewards = batch.rewards.nan_to_num().double()
        values = torch.where((rewards == 1) & batch.action_mask.any(dim=1), rewards, 0.0)
        return Advantages(values=values, baseline=torch.zeros_like(values))


class Silent(Baseline):
    def advantages(self, batch):
        values = torch.zeros(len(batch.rewards))
        return Advantages(values=values, baseline=values)


class Shifts(WithState):
    """The state moves the baseline."""

    def changed(self, values):
        return torch.where(values != 0, values - self.seen, 0.0)

    def learnt(self, batch):
        scored = batch.rewards[~batch.rewards.isnan()]
        return self.of_scored(scored) if len(scored) else self.seen


class FirstReward(Shifts):
    def of_scored(self, scored):
        return float(scored[0])


class LastReward(Shifts):
    def of_scored(self, scored):
        return float(scored[-1])


class RootOfTheMean(Shifts):
    def of_scored(self, scored):
        return 0.5 * self.seen + 0.5 * float(scored.mean().sqrt())


class WithoutEps(Baseline):
    uses_own_reward = True

    def advantages(self, batch):
        rows = scorable_rows(batch)
        values = torch.zeros(len(rows))
        if int(rows.sum()) > 1:
            scored = batch.rewards[rows]
            values[rows] = (scored - scored.mean()) / scored.std()
        return Advantages(values=values, baseline=torch.zeros_like(values))


class DividesByTheLastDeviation(WithState):
    seen = 1.0

    def learnt(self, batch):
        scored = batch.rewards[~batch.rewards.isnan()]
        return float(scored.std()) if len(scored) > 1 else self.seen

    def changed(self, values):
        return values / self.seen


class HidesNan(WithState):
    def learnt(self, batch):
        return self.seen + float(batch.rewards.mean())

    def changed(self, values):
        return values


class SortsPrompts(Rloo):
    def advantages(self, batch):
        batch.prompt_ids.sort()
        return super().advantages(batch)


class ScalesWeights(Gdpo):
    def advantages(self, batch):
        batch.reward_weights.mul_(2)
        return super().advantages(batch)


class WritesInUpdate(Rloo):
    def update(self, batch):
        batch.rewards.zero_()


class NanMetric(Rloo):
    def advantages(self, batch):
        return replace(super().advantages(batch), metrics={"mean": float(batch.rewards.mean())})


class NoMetrics(Rloo):
    def advantages(self, batch):
        return replace(super().advantages(batch), metrics=None)


class WithGradient(Rloo):
    def advantages(self, batch):
        found = super().advantages(batch)
        return replace(found, values=found.values.clone().requires_grad_())


class ByChance(Rloo):
    def advantages(self, batch):
        found = super().advantages(batch)
        return replace(found, baseline=found.baseline + 1e-9 * torch.randn(()))


class NoGroups(Rloo):
    min_group_size = 0


class Sometimes(Rloo):
    token_level = "sometimes"


class ValuesOfNobody(Rloo):
    requires = frozenset({"values"})


class RequiresKl(Rloo):
    requires = frozenset({"kl"})


class RequiresText(Rloo):
    requires = "energies"


class SaysYes(Rloo):
    uses_own_reward = "yes"


class StateIsNone(Rloo):
    def state_dict(self):
        return None


class StateIsCode(Rloo):
    def state_dict(self):
        return {"a": lambda: 1}


class StateIsAnObject(Rloo):
    def state_dict(self):
        return {"a": threading}  # a module cannot be pickled


class StateOfPath(Rloo):
    def state_dict(self):
        return {"a": functools.partial(math.sqrt, 2.0)}


class UpdateRaises(Rloo):
    def update(self, batch):
        raise KeyError("x")


class Exits(Rloo):
    def advantages(self, batch):
        raise SystemExit(3)


class Locked(Rloo):
    def __init__(self):
        self.lock = threading.Lock()


def once():
    """A factory that works one time."""
    built = []

    def build():
        if built:
            raise OSError("file in use")
        built.append(1)
        return Rloo()

    return build


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (FlippedIfGraded, r"- sign: .*is it b - r\?\) \(rewards between 0 and 1\)$"),
        (FlippedIfNegative, r"- sign: .*is it b - r\?\) \(after some batches, rewards between -1 and 1\)$"),
        (SilentIfGraded, r"- sign: .*nothing would be learnt \(rewards between 0 and 1\)$"),
        (Silent, r"- sign: .*nothing would be learnt$"),
        (FirstReward, "- row_order_of_update: "),
        (LastReward, "- row_order_of_update: "),
        (WithoutEps, "- equal_rewards: .*not finite when all rewards are equal"),
        (DividesByTheLastDeviation, "- equal_rewards: .*not finite after a batch in which all rewards are equal"),
        (HidesNan, "- finite_state: HidesNan has a state that turns NaN in `update`: seen"),
        (SortsPrompts, "- no_side_effect: SortsPrompts writes into the batch's `prompt_ids`$"),
        (ScalesWeights, "- no_side_effect: ScalesWeights writes into the batch's `reward_weights`$"),
        (WritesInUpdate, "- no_side_effect: WritesInUpdate writes into the batch's `rewards` in `update`$"),
        (NanMetric, r"returns metrics that are not finite: \['mean'\] \(rows without a reward are NaN in `rewards`\)$"),
        (NoMetrics, "returns metrics that are a NoneType, not a dict$"),
        (WithGradient, "returns values that require a gradient"),
        (NoGroups, "- declarations: NoGroups says min_group_size = 0, not a whole number of at least 1$"),
        (Sometimes, "- declarations: Sometimes says token_level = 'sometimes', not one of never, with_kl, always$"),
        (ValuesOfNobody, r"- declarations: ValuesOfNobody requires \['values'\], which .* `LearnedBaseline` only$"),
        (RequiresKl, r"- declarations: RequiresKl requires \['kl'\]; .*say `reads_kl = True` for KL\)$"),
        (RequiresText, "- declarations: RequiresText says requires = 'energies', not a set of names"),
        (SaysYes, "- declarations: SaysYes says uses_own_reward = 'yes', not True or False$"),
        (NoAdvantages, "- shape_and_zeros: NoAdvantages returns a Tensor from `advantages`, not Advantages$"),
        (StateIsNone, "StateIsNone returns a NoneType from `state_dict`, not a dict$"),
        (StateIsCode, "StateIsCode has a state that cannot be saved: "),
        (StateIsAnObject, "StateIsAnObject has a state that cannot be saved: "),
        (StateOfPath, "has a state with more in it than tensors, numbers, strings and dicts of them$"),
        (UpdateRaises, r"raises KeyError: 'x' in `update` \(test_checks.py, line \d+\) \(after some batches\)$"),
        (Exits, r"raises SystemExit: 3 in `advantages` \(test_checks.py, line \d+\)$"),
    ],
)
def test_one_cause_is_told_once(broken, message):
    with pytest.raises(BaselineError) as told:
        check_baseline(broken)
    first, *causes = str(told.value).splitlines()
    assert first == f"{broken.__name__} breaks a promise of a baseline:"
    assert len(causes) == 1
    assert re.search(message, causes[0]), causes[0]


def test_a_state_that_negative_rewards_turn_to_nan_is_told_as_that():
    with pytest.raises(BaselineError) as told:
        check_baseline(RootOfTheMean)
    when = "(after some batches, rewards between -1 and 1)"
    assert [line.partition(": ")[0] for line in str(told.value).splitlines()[1:]] == [
        "- shape_and_zeros",
        "- finite_state",
    ]
    assert f"turns NaN in `update`: seen {when}" in str(told.value)


def test_advantages_by_chance_are_not_told_as_a_change_of_state():
    with pytest.raises(
        BaselineError, match="no_side_effect: ByChance gives other advantages when it is given the same"
    ):
        check_baseline(ByChance)


class RaisesAndByPosition(Rloo):
    def advantages(self, batch):
        if bool(batch.rewards.isnan().all()):
            raise ZeroDivisionError("division by zero")
        found = super().advantages(batch)
        return replace(found, values=found.values * torch.arange(len(found.values)))


def test_what_raises_does_not_hide_the_rest():
    with pytest.raises(BaselineError) as told:
        check_baseline(RaisesAndByPosition)
    assert "- all_unscored: raises ZeroDivisionError: division by zero in `advantages`" in str(told.value)
    assert "- row_order: " in str(told.value)


def needs(strength):
    return Rloo()


class UnreadableValues(Rloo):
    @property
    def values(self):
        raise RuntimeError("not loaded")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Locked(), "Locked cannot be copied: TypeError: .*lock.*Give its class, or a function that builds it"),
        (once(), "build cannot be built again: OSError: file in use"),
        (functools.partial(needs, wrong=1), "needs cannot be built: TypeError"),
    ],
)
def test_what_cannot_be_built_is_one_message(broken, message):
    with pytest.raises(BaselineError, match=message):
        check_baseline(broken)


def test_attributes_that_are_nobodys_promise_may_raise():
    assert check_baseline(UnreadableValues) == check_baseline(Locked) == check_baseline(functools.partial(needs, 1.0))
