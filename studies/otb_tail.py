"""When a rollout is longer than the rest of its group: advantage 0 (`tail` "zero") or the last baseline ("last")?

    python -m studies.otb_tail [--quick]

With Eq. 8 of the OTB paper, the tail of a group's longest rollout has advantage 0. What this costs is measured on a
softmax policy over two letters and EOS, with at most eight tokens and a 0/1 reward for the whole sequence. All 511
sequences are enumerated, so the gradient g of the expected reward is exact. A group of G rollouts estimates it as
``1/G sum_i sum_t A_it d log pi(y_it)``. These properties of the estimate are measured over many groups, with
Monte-Carlo errors:

- ``bias``, ``|E - g| / |g|`` where E is its expectation; ``kept``, ``E . g / |g|^2``; and ``aside``, the part of E
  orthogonal to g, over ``|g|``. A mean of G rewards that includes the rollout's own one has ``kept`` 1 - 1/G and
  ``aside`` 0.
- ``variance``, the trace of its covariance over ``|g|^2``
- ``gain 1``, ``kept^2 / (kept^2 + aside^2 + variance)``: what a gradient step of the best size gains, as a share of
  what such a step along g would gain. It does not depend on scale. ``gain 64`` is the same for the mean of 64 groups.

Results: ``studies/results/otb_tail.json``, without the Monte-Carlo errors, which the command prints.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from basis_rl.baselines import Baseline, DrGrpo, Opo, OptimalTokenBaseline, Rloo
from basis_rl.functional.energy import logit_gradient_energy
from basis_rl.types import RolloutBatch
from benchmarks.common import one_thread
from studies.runs import placed, save_table, study_parser

TOKENS, LENGTH, SEEDS, GROUPS = 3, 8, 3, (2, 4, 8)  # token 0 is EOS
CHUNKS, CHUNK_GROUPS = 12, 1500  # groups of a cell, and in how many chunks for the jackknife errors
BASELINES: dict[str, Baseline] = {
    "rloo": Rloo(),
    "dr_grpo": DrGrpo(),
    "opo token, zero": Opo("token", "zero"),
    "opo token, last": Opo("token", "last"),
    "otb, zero": OptimalTokenBaseline("zero"),
    "otb, last": OptimalTokenBaseline("last"),
}
# How many last tokens of the prefix select the row of logits (LENGTH: each prefix has its own row); the logits' spread.
POLICIES = {"flat": (LENGTH, 0.5), "peaked": (LENGTH, 2.0), "shared": (1, 1.0)}
REWARDS = ["coin", "majority", "long", "short"]
COLUMNS = ["tail", "bias", "kept", "aside", "variance", "gain 1", "gain 64"]
LETTERS = range(1, TOKENS)
SEQUENCES = [(*s, 0) for n in range(LENGTH) for s in itertools.product(LETTERS, repeat=n)]
SEQUENCES += itertools.product(LETTERS, repeat=LENGTH)
LENGTHS = torch.tensor([float(len(s)) for s in SEQUENCES], dtype=torch.float64)


class Policy:
    """A policy, and what is needed of each of its S sequences.

    These are the row of the logit table, mask and energy of each token, ``(S, L)``; ``d log pi(y_t) / d logits``,
    ``(S, L, V)``; and the probabilities, ``(S,)``.
    """

    def __init__(self, context: int, spread: float, seed: int) -> None:
        names: dict[tuple[int, ...], int] = {}
        rows, tokens, mask = (torch.zeros((len(SEQUENCES), LENGTH), dtype=torch.long) for _ in range(3))
        for s, sequence in enumerate(SEQUENCES):
            for t, token in enumerate(sequence):
                row = names.setdefault(sequence[max(0, t - context) : t], len(names))
                rows[s, t], tokens[s, t], mask[s, t] = row, token, 1
        generator = torch.Generator().manual_seed(seed)
        logits = spread * torch.randn((len(names), TOKENS), generator=generator, dtype=torch.float64)
        logits[:, 0] -= 0.5  # a sequence ends with a chance of about a quarter at each token
        log_probs = logits.log_softmax(-1)[rows]
        chosen = log_probs.gather(-1, tokens[..., None])[..., 0]
        self.rows, self.mask = rows, mask.bool()
        self.scores = (torch.nn.functional.one_hot(tokens, TOKENS) - log_probs.exp()) * mask[..., None]
        self.energies = logit_gradient_energy(chosen, log_probs.exp().square().sum(-1))
        self.probs = (chosen * mask).sum(1).exp()

    def gradient(self, which: Tensor, advantages: Tensor, groups: Tensor) -> Tensor:
        """``sum_i sum_t A_it d log pi(y_it)`` of each group, ``(groups, parameters)``; advantages ``(N, L)``."""
        table, count = int(self.rows.max()) + 1, int(groups.max()) + 1
        index, terms = groups[:, None] * table + self.rows[which], advantages[..., None] * self.scores[which]
        out = torch.zeros((count * table, TOKENS), dtype=torch.float64)
        return out.index_add_(0, index.flatten(), terms.flatten(0, 1)).view(count, -1)


def rewards(kind: str, seed: int) -> Tensor:
    """``(S,)``: at random (coin); or 1 for all, long or short sequences with more of letter 1 than of letter 2."""
    if kind == "coin":
        return torch.randint(0, 2, (len(SEQUENCES),), generator=torch.Generator().manual_seed(seed)).double()
    lengths = {"majority": range(99), "long": range(5, 99), "short": range(5)}[kind]
    return torch.tensor([s.count(1) > s.count(2) and len(s) in lengths for s in SEQUENCES]).double()


def figures(g: Tensor, estimate: Tensor, power: Tensor, tail: Tensor) -> Tensor:
    """The `COLUMNS`, from C chunks of groups: mean estimate ``(C, D)``, mean squared norm and tail share ``(C,)``."""

    def squared_norm(x: Tensor) -> Tensor:  # of the expectation: only between chunks, so without the noise of the mean
        return ((x.sum(0).square().sum() - x.square().sum()) / (len(x) * (len(x) - 1)) / (g @ g)).clamp(min=0)

    along = estimate @ g / (g @ g)
    kept2, aside2 = along.mean() ** 2, squared_norm(estimate - along[:, None] * g)
    variance = power.mean() / (g @ g) - kept2 - aside2
    gains = [kept2 / (kept2 + aside2 + variance / groups) for groups in (1, 64)]
    bias2 = squared_norm(estimate - g)
    return torch.stack([tail.mean(), bias2.sqrt(), along.mean(), aside2.sqrt(), variance, *gains])


def cell(
    policy: Policy, reward: Tensor, group: int, chunks: int = CHUNKS, chunk_groups: int = CHUNK_GROUPS
) -> dict[str, Tensor]:
    """For each baseline, on the same groups: the figures and their jackknife errors, ``(2, columns)``.

    Args:
        policy: the policy that is sampled from.
        reward: reward of every sequence, ``(S,)``.
        group: rollouts per group.
        chunks: number of chunks.
        chunk_groups: groups per chunk.
    """
    everything = torch.arange(len(SEQUENCES))
    g = policy.gradient(everything, (policy.probs * reward)[:, None], torch.zeros_like(everything))[0]
    kept: dict[str, list[list[Tensor]]] = {name: [] for name in BASELINES}
    groups = torch.arange(chunk_groups).repeat_interleave(group)
    for _ in range(chunks):
        which = torch.multinomial(policy.probs, len(groups), replacement=True)
        mask, energies = policy.mask[which], policy.energies[which]
        batch = RolloutBatch(
            rewards=reward[which], group_ids=groups, prompt_ids=["p"] * len(which), action_mask=mask, energies=energies
        )
        for name, baseline in BASELINES.items():
            result = baseline.advantages(batch)
            values = result.values if result.values.ndim == 2 else result.values[:, None] * mask
            estimates = policy.gradient(which, values, groups) / group
            tail = torch.tensor(result.metrics.get("tail", 0.0), dtype=torch.float64)
            kept[name].append([estimates.mean(0), estimates.square().sum(1).mean(), tail])
    out = {}
    for name, found in kept.items():
        parts = [torch.stack(part) for part in zip(*found, strict=True)]
        left_out = [figures(g, *(part[k] for part in parts)) for k in ~torch.eye(chunks, dtype=torch.bool)]
        error = ((chunks - 1) * torch.stack(left_out).var(0, correction=0)).sqrt()
        out[name] = torch.stack([figures(g, *parts), error])
    return out


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = study_parser(__doc__, "otb_tail")
    options = placed(parser.parse_args(argv))
    chunks, chunk_groups, seeds = (3, 20, 1) if options.quick else (CHUNKS, CHUNK_GROUPS, SEEDS)
    one_thread()
    torch.manual_seed(0)
    rows = []
    for kind, group in itertools.product(REWARDS, GROUPS):
        tables, correlations = [], []
        for name, seed in itertools.product(POLICIES, range(seeds)):
            policy, reward = Policy(*POLICIES[name], seed), rewards(kind, seed)
            tables.append(cell(policy, reward, group, chunks, chunk_groups))
            covariance = torch.cov(torch.stack([LENGTHS, reward]), aweights=policy.probs, correction=0)
            correlations.append(float(covariance[0, 1] / covariance.diag().prod().sqrt()))
            labels = {"reward": kind, "group": group, "policy": name, "seed": seed}
            for b, (values, _) in tables[-1].items():
                rows.append({**labels, "baseline": b, **dict(zip(COLUMNS, values.tolist(), strict=True))})
        print(f"\n{kind}, G = {group}; correlation with length {min(correlations):.2f} to {max(correlations):.2f}")
        print(" " * 16 + "".join(f"{column:>16}" for column in COLUMNS))
        for b in BASELINES:
            values, errors = torch.stack([table[b] for table in tables], dim=1)
            pairs = zip(values.mean(0).tolist(), (errors.norm(dim=0) / len(tables)).tolist(), strict=True)
            print(f"{b:16}" + "".join(f"{value:8.3f} ({error:.3f})" for value, error in pairs))
        zero, last = (torch.stack([table[f"otb, {tail}"][0, -2:] for table in tables]) for tail in ("zero", "last"))
        for column, ratio in zip(COLUMNS[-2:], (last / zero).T, strict=True):
            print(f"last / zero, {column}: {ratio.log().mean().exp():.3f}, {ratio.min():.3f} to {ratio.max():.3f}")
    save_table("otb_tail", {"groups": chunks * chunk_groups}, rows, options.results)


if __name__ == "__main__":
    main()
