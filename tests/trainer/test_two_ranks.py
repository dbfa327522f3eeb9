"""Two ranks on CPU, a group across both, against one: advantages to the bit, and the rest."""

import pytest
import torch

from basis_rl.run.rollouts import files, read
from tests.support.ranks import Called
from tests.trainer.straddling import FEW, REST, SELECTED, UNEQUAL, main


def on_one_and_two(one, two, model, names):
    """What one rank (this process) and two have found: ``(results, others)`` of each rank."""
    launched = Called(two, "tests.trainer.straddling:main", two, str(model), 2, names)
    return [main(one, str(model), 1, names), *launched.found()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def runs(folders, tiny_path):
    return on_one_and_two(*folders, tiny_path, FEW)


def test_the_rollouts_of_all_ranks_are_kept(runs, folders):
    """Those of rloo are of a later run in the same folder."""
    for folder, (results, _) in zip(folders, runs[:2], strict=True):
        for name in set(FEW) - {"rloo"}:
            kept = files(folder / f"run-{name}").values()
            for path, batch in zip(kept, results[name], strict=True):
                rows = list(read([path]))
                assert [row["prompt_id"] for row in rows] == batch["prompt_ids"]
                rewards = torch.tensor([torch.nan if row["reward"] is None else row["reward"] for row in rows])
                assert torch.equal(rewards.nan_to_num(7), batch["rewards"].nan_to_num(7))
                advantages, mask = batch["advantages"].cpu(), batch["action_mask"]
                if advantages.ndim == 2:
                    advantages = (advantages * mask).sum(dim=1) / mask.sum(dim=1)
                assert [row["advantage"] for row in rows] == pytest.approx(advantages.tolist(), abs=1e-6)
                assert [row["tokens"] for row in rows] == mask.sum(dim=1).tolist()
                assert all((row["chance"] is not None) == (name in (SELECTED, UNEQUAL)) for row in rows)


def test_losses_do_not_depend_on_the_number_of_ranks(runs):
    """What each loss logs, and where it leads: the mean over two ranks' tokens, not the mean of their means."""
    one, *two = [others["losses"] for _, others in runs]
    assert len(one) == 4
    for name, expected in one.items():
        keys = [key for key in expected["log"][0] if key.startswith(("entropy", "kl", "clip_ratio/", "objective/"))]
        assert {"entropy", "kl"} <= set(keys)
        assert ("objective/outside" in keys) == (name == "own")
        for key in keys:
            logged = [row[key] for row in expected["log"] if key in row]
            assert len(logged) == 4
            assert max(logged) > 1e-3 or key.startswith("clip_ratio/")
            for rank in two:
                assert [row[key] for row in rank[name]["log"] if key in row] == pytest.approx(
                    logged, rel=1e-3, abs=1e-5
                )
        for rank in two:
            for key, value in expected["policy"].items():
                torch.testing.assert_close(rank[name]["policy"][key], value, rtol=0, atol=2e-4)


@pytest.mark.parametrize("names", [FEW, pytest.param(REST, marks=pytest.mark.long)], ids=["few", "rest"])
def test_advantages_do_not_depend_on_the_number_of_ranks(names, request, tmp_path_factory, tiny_path):
    found = (
        request.getfixturevalue("runs")
        if names == FEW
        else on_one_and_two(tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two"), tiny_path, names)
    )
    one, *two = [results for results, _ in found]
    assert list(one) == names
    for name, batches in one.items():
        assert len(batches) == 2
        for step, expected in enumerate(batches):
            groups = expected["group_ids"].tolist()
            # The prompts of the first batch are so alike that equal groups are best.
            equal = name != UNEQUAL or step == 0
            assert (groups == [0] * 4 + [1] * 4 + [2] * 4) == equal
            names_of_groups = set(zip(groups, expected["prompt_ids"], strict=True))
            assert len(names_of_groups) == len(set(groups)) == len(set(expected["prompt_ids"])) == 3
            assert expected["rewards"].isnan().any()
            assert (expected["advantages"] != 0).any(), f"{name}: zeros would prove nothing"
            for rank in two:
                for key, value in expected.items():
                    got = rank[name][step][key]
                    if isinstance(value, list | bool):
                        same = got == value
                    elif key != "advantages" or not expected["of_policy"]:
                        same = torch.equal(got.nan_to_num(7), value.nan_to_num(7))
                    else:  # what the policy and a module compute: their gradients are summed in another order
                        same = torch.allclose(got, value, rtol=0, atol=2e-4)
                    assert same, f"{name}, batch {step}: {key} differs between one rank and two"


def test_the_noise_of_the_gradient_is_that_of_the_micro_batches_of_all_ranks(runs):
    for _, others in runs[:2]:  # the first rank logs
        found = others["noise"]
        assert len(found["logged"]) == 2
        for row, gradients in zip(found["logged"], found["gradients"].double(), strict=True):
            assert len(gradients) == 4
            mean = gradients.mean(dim=0)
            variance = ((gradients - mean) ** 2).sum() / (4 - 1) / 4  # of the mean, unbiased
            assert row["gradient/variance"] == pytest.approx(float(variance), rel=1e-3)
            assert row["gradient/signal"] == pytest.approx(float(mean @ mean), rel=1e-3)
            assert row["gradient/total_power"] == pytest.approx(float((gradients**2).sum(dim=1).mean()), rel=1e-3)
            assert row["gradient/variance"] > 0
            assert row["grad_norm"] ** 2 == pytest.approx(row["gradient/signal"], rel=1e-3)


def test_refills_are_the_same_on_all_ranks(runs):
    """Groups with variance, whose rewards are those of their own rollouts, and the cost of what was thrown away."""
    for rank, other in ((0, 0), (1, 2), (2, 1)):
        found, same = runs[rank][1]["refilled"], runs[other][1]["refilled"]
        assert len(found["batches"]) == 3
        assert found["rollouts"] == same["rollouts"] > 3 * 12
        for batch, twin in zip(found["batches"], same["batches"], strict=True):
            assert batch["prompt_ids"] == twin["prompt_ids"]
            assert torch.equal(batch["rewards"].nan_to_num(7), twin["rewards"].nan_to_num(7))
            assert torch.equal(batch["sums"], twin["sums"])
            assert batch["prompt_ids"][::2] == batch["prompt_ids"][1::2]
            groups = batch["rewards"].view(-1, 2)
            assert (groups[:, 0] != groups[:, 1]).all()
            assert not groups.isnan().any()
            assert (batch["sums"] % 2 == batch["rewards"]).all()


def test_all_stop_when_one_of_them_got_a_signal(runs):
    assert [others["stopped"] for _, others in runs] == [2, 2, 2]
