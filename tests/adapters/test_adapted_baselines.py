"""A baseline in another trainer gives what it gives by itself, or says why it cannot be there."""

import copy
import math

import pytest
import torch

from basis_rl.adapters.base import Estimator
from basis_rl.baselines import BASELINES, BasisHistory
from basis_rl.types import RolloutBatch
from tests.support.tiny import named_baseline, sums

DATA = sums()
GROUP = 4


def drawn(seed, prompts=6):
    """Rewards, ragged masks, groups and ids of a batch of `prompts` times four rollouts, in any order."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(DATA), generator=generator)[:prompts].repeat_interleave(GROUP)
    chosen = chosen[torch.randperm(len(chosen), generator=generator)].tolist()
    rewards = torch.randint(0, 2, (len(chosen),), generator=generator).float()
    lengths = torch.randint(1, 6, (len(chosen), 1), generator=generator)
    ids = [DATA[row]["prompt_id"] for row in chosen]
    return rewards, torch.arange(6) < lengths, [f"uid {row}" for row in chosen], ids


def by_itself(baseline, batches):
    """The plain loop."""
    for step, (rewards, mask, groups, ids) in enumerate(batches):
        numbers = torch.tensor([sorted(set(groups)).index(group) for group in groups])
        batch = RolloutBatch(rewards=rewards, group_ids=numbers, prompt_ids=ids, action_mask=mask, step=step)
        values = baseline.advantages(batch).values
        baseline.update(batch)
        yield (values if values.ndim == 2 else values[:, None]) * mask


@pytest.mark.parametrize("name", BASELINES)
def test_each_baseline_serves_as_by_itself_or_names_what_it_lacks(name):
    baseline = named_baseline(name, DATA)
    if baseline.requires:
        reads = ", ".join(sorted(baseline.requires))
        with pytest.raises(ValueError, match=f"'{name}' reads {reads}, and X hands over only rewards, prompts, masks"):
            Estimator(baseline, "X")
        return
    batches = [drawn(seed) for seed in range(4)]
    expected = by_itself(copy.deepcopy(baseline), batches)
    estimator = Estimator(baseline, "X")
    for batch, values in zip(batches, expected, strict=True):
        found = estimator.estimate(*batch)
        assert found.dtype == batch[0].dtype
        torch.testing.assert_close(found, values.float())
    assert estimator.step == 4


def test_nothing_is_learnt_from_a_row_without_tokens():
    with_padding, without = (Estimator(BasisHistory(fixed_range=(0, 1)), "X") for _ in range(2))
    rewards, mask, groups, ids = drawn(1)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padded = (torch.cat([rewards, torch.zeros(2)]), torch.cat([mask, padding]), [*groups, "p", "p"], [*ids, "p", "p"])
    expected = without.estimate(rewards, mask, groups, ids)
    found = with_padding.estimate(*padded)
    torch.testing.assert_close(found[:-2], expected)
    assert not found[-2:].any()
    for each in (with_padding, without):
        assert each.baseline.believed(["p"]) == without.baseline.believed(["never met"])


def test_groups_that_are_too_small_are_refused():
    rewards, mask, _, ids = drawn(2)
    with pytest.raises(ValueError, match="'rloo' needs at least 2 rollouts of a prompt in a batch, and X has drawn 1"):
        Estimator("rloo", "X").estimate(rewards, mask, range(len(ids)), ids)


@pytest.mark.parametrize("kept", ["dict", "file"])
def test_a_belief_goes_on_from_its_state(kept, tmp_path):
    batches = [drawn(seed) for seed in range(3)]
    *_, expected = by_itself(BasisHistory(), batches)
    file = tmp_path / "state.pt" if kept == "file" else None
    first = Estimator(BasisHistory(), "X", state_file=file)
    for batch in batches[:2]:
        first.estimate(*batch)
    second = Estimator(BasisHistory(), "X", state_file=file)
    if file is None:
        second.load_state_dict(first.state_dict())
    assert second.step == 2
    torch.testing.assert_close(second.estimate(*batches[2]), expected.float())


def test_a_state_of_another_baseline_is_refused(tmp_path):
    Estimator("rloo", "X", state_file=tmp_path / "state.pt").estimate(*drawn(0))
    with pytest.raises(ValueError, match="The state is not one of this Spo"):
        Estimator("spo", "X", state_file=tmp_path / "state.pt")


@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[: len(whole) // 2], lambda whole: b"text"])
def test_a_damaged_state_is_named(damage, tmp_path):
    file = tmp_path / "state.pt"
    Estimator("spo", "X", state_file=file).estimate(*drawn(0))
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"state.pt' has no baseline's state"):
        Estimator("spo", "X", state_file=file)


def test_the_folder_of_a_state_is_made(tmp_path):
    file = tmp_path / "runs" / "1" / "state.pt"
    Estimator("spo", "X", state_file=file).estimate(*drawn(0))
    assert Estimator("spo", "X", state_file=file).step == 1


@pytest.mark.parametrize("name", ["rloo", "grpo", "basis_history", "spo"])
def test_of_an_infinite_reward_nothing_is_learnt(name):
    estimator, other = Estimator(name, "X"), Estimator(name, "X")
    rewards, *rest = drawn(0)
    rewards[3] = math.inf
    with pytest.raises(ValueError, match="a reward is infinite"):
        estimator.estimate(rewards, *rest)
    torch.testing.assert_close(estimator.estimate(*drawn(1)), other.estimate(*drawn(1)))


@pytest.mark.parametrize("broken", ["values", "baseline"])
def test_advantages_that_are_not_finite_are_not_handed_on(broken):
    class Broken(BasisHistory):
        def advantages(self, batch):
            result = super().advantages(batch)
            getattr(result, broken)[0] = math.nan
            return result

    with pytest.raises(ValueError, match="advantages or baselines of batch 0 are not finite"):
        Estimator(Broken(), "X").estimate(*drawn(0))
