"""Do the baselines give the advantages that verl's own functions give, and the objectives the gradients?

    python -m studies.agreement VERL [--quick]

VERL is the folder of a checkout of verl (``git clone https://github.com/volcengine/verl``). Its functions of advantages
(``verl/trainer/ppo/core_algos.py``) are run as they are, on 20 random batches with ragged groups and ragged masks, of
which half have rewards of 0 and 1 and half real ones; where a function is made for tools, the masks have holes. verl's
requirements need not be installed: stand-ins take the place of what these functions do not use. None of verl's code is
in this repository. Everything is in float64.

Where verl differs by something that is known, this is put right on our side: its deviations over tokens have ddof 1
(ours times ``sqrt((n - 1) / n)``), and its GPG counts rollouts with a reward other than 0 for alpha (``dr_grpo`` times
that).

Of the modes of the rollout correction that reject rollouts, the masks of
``verl/trainer/ppo/rollout_corr_helper.py`` are compared. Its bounds of ``seq_mean_k1`` are of ``pi_rollout / pi``, so
it gets the inverse of ours.

Of the objectives the gradients of the loss are compared. verl's ``clip_cov`` draws tokens at random, so it is not
among them; the masks of ``kl_cov`` are chosen alike.

Results: ``studies/results/agreement.json``, the largest absolute difference of each baseline and objective.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from subprocess import run
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines import build_baseline
from basis_rl.functional.objectives import aggregate, importance_weights
from basis_rl.objectives import OBJECTIVES, LossInputs, LossSettings, Objective
from basis_rl.types import RolloutBatch
from benchmarks.common import one_thread, save
from studies.runs import placed, rounded, study_parser

_TOKENS = 11


def load_verl(checkout: Path) -> tuple[Any, Any]:
    """verl's modules of advantages and of the rollout correction, with stand-ins for the packages around them."""

    def stand_in(name: str, **content: Any) -> None:
        module = ModuleType(name)
        module.__path__ = [str(checkout / name.replace(".", "/"))]
        vars(module).update(content)
        sys.modules[name] = module

    for name in ("verl", "verl.utils", "verl.plugin", "verl.trainer", "verl.trainer.ppo", "verl.workers"):
        stand_in(name)
    stand_in("omegaconf", DictConfig=dict)
    stand_in("tensordict", TensorDict=dict)
    stand_in("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
    stand_in("verl.trainer.config.algorithm", RolloutCorrectionConfig=SimpleNamespace)
    stand_in("verl.protocol", DataProto=dict)
    stand_in("verl.workers.config", ActorConfig=SimpleNamespace)
    stand_in("verl.workers.config.actor", PolicyLossConfig=SimpleNamespace)
    vars(sys.modules["verl.utils"]).update(vars(import_module("verl.utils.groupwise")))
    names = ("verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper")
    algorithms, correction = (import_module(name) for name in names)
    return algorithms, correction


@dataclass(frozen=True)
class Case:
    """A random batch: ``(N,)`` rewards, groups and greedy rewards; ``(N, T)`` masks without and with tool output."""

    rewards: Tensor
    groups: Tensor
    greedy: Tensor
    mask: Tensor
    holes: Tensor
    log_probs: Tensor
    sum_pi_squared: Tensor
    values: Tensor

    def batch(self, mask: Tensor) -> RolloutBatch:
        """As our baselines read it."""
        return RolloutBatch(
            rewards=self.rewards,
            group_ids=self.groups,
            prompt_ids=[str(group) for group in self.groups.tolist()],
            action_mask=mask,
            energies=(1 - 2 * self.log_probs.exp() + self.sum_pi_squared) * mask,
            values=self.values * mask,
            greedy_rewards=self.greedy,
        )

    def on_last_token(self, mask: Tensor) -> Tensor:
        """``(N, T)`` rewards as verl reads them."""
        last = torch.where(mask, torch.arange(_TOKENS), -1).amax(dim=1)
        return torch.zeros(mask.shape).double().scatter(1, last[:, None], self.rewards[:, None])


def draw(seed: int) -> Case:
    """Six groups of three to six rollouts, in any order."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    sizes = torch.randint(3, 7, (6,), generator=generator)
    groups = torch.repeat_interleave(torch.arange(6), sizes)
    groups = groups[torch.randperm(len(groups), generator=generator)]
    n = len(groups)
    binary = seed % 2 == 0
    rewards, greedy = ((uniform(n) < 0.5).double() if binary else uniform(n) for _ in range(2))
    mask = torch.arange(_TOKENS)[None] < torch.randint(1, _TOKENS + 1, (n, 1), generator=generator)
    holes = mask.clone()
    holes[mask.sum(dim=1) > 4, 1:3] = False
    log_probs = -2 * uniform(n, _TOKENS)
    least = log_probs.exp() ** 2  # that of the token alone
    squares = least + uniform(n, _TOKENS) * (1 - log_probs.exp()) ** 2
    return Case(rewards, groups, greedy, mask, holes, log_probs, squares, uniform(n, _TOKENS))


def compared(verl: Any, case: Case) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The name of each comparison, and the advantages ``(N, T)`` of verl and of ours."""

    def theirs(name: str, mask: Tensor, *given: Any, **settings: Any) -> Tensor:
        found: Tensor = verl.get_adv_estimator_fn(name)(case.on_last_token(mask), *given, **settings)[0]
        return found * mask

    def ours(name: str, mask: Tensor, **params: Any) -> Tensor:
        values = build_baseline(name, **params).advantages(case.batch(mask)).values
        return (values if values.ndim == 2 else values[:, None]) * mask

    mask, index = case.mask, case.groups.numpy().astype(object)
    given = (mask.double(), index)
    unscaled = {"norm_adv_by_std_in_grpo": False}
    yield "grpo", theirs("grpo", mask, *given, epsilon=1e-4), ours("grpo", mask)
    yield "dr_grpo (grpo without std)", theirs("grpo", mask, *given, **unscaled), ours("dr_grpo", mask)
    for name in ("rloo", "opo"):
        yield name, theirs(name, mask, *given), ours(name, mask)
    yield "remax", theirs("remax", mask, case.greedy, mask.double()), ours("remax", mask)
    best = ours("pass_at_k", mask, form="leave_one_out")
    yield "pass_at_k, leave_one_out (grpo_passk without std)", theirs("grpo_passk", mask, *given, config=unscaled), best
    alpha = len(case.rewards) / max(1, int((case.rewards != 0).sum()))
    yield "dr_grpo times their alpha (gpg)", theirs("gpg", mask, *given), alpha * ours("dr_grpo", mask)
    ddof = (1 - 1 / mask.sum().double()).sqrt()
    found = theirs("reinforce_plus_plus", mask, mask.double(), config=SimpleNamespace(gamma=1.0))
    yield "reinforce_pp, over tokens", found, ddof * ours("reinforce_pp", mask, over="tokens")
    found = theirs("reinforce_plus_plus_baseline", mask, *given)
    yield "reinforce_pp_baseline, over tokens", found, ddof * ours("reinforce_pp_baseline", mask, over="tokens")
    of_tokens = {"old_log_probs": case.log_probs, "sum_pi_squared": case.sum_pi_squared}
    for name, at in (("optimal_token_baseline", mask), ("tir_optimal_token_baseline", case.holes)):
        for zeroed, tail in ((False, "zero"), (True, "return")):
            found = theirs(name, at, at.double(), index, **of_tokens, handle_zero_tail=zeroed)
            yield f"otb, {tail} ({name})", found, ours("otb", at, tail=tail)
    for at, where in ((mask, ""), (case.holes, ", tool output")):
        ddof = (1 - 1 / at.sum().double()).sqrt()
        for gamma, lam in ((1.0, 1.0), (0.99, 0.95)):
            found = theirs("gae", at, case.values * at, at.double(), gamma, lam)
            name = f"ppo, gamma {gamma:g}, lam {lam:g}{where} (gae)"
            yield name, found, ddof * ours("ppo", at, gamma=gamma, lam=lam)


def losses(verl: Any, case: Case) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The name of each objective, and the gradients ``(N, T)`` of verl's loss and of ours."""
    low, high = 0.15, 0.25
    moved = 0.3 * torch.sin(1e4 * case.log_probs)
    old = (case.log_probs + moved).clamp(max=-1e-3)
    advantages = case.rewards - case.rewards.mean()
    settings = LossSettings(epsilon_low=low, epsilon_high=high, max_completion_length=_TOKENS)
    of_policy = {"kl_cov_ratio": 2e-4, "ppo_kl_coef": 1.0}
    config = SimpleNamespace(
        clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, global_batch_info={}, get=lambda _, given: given,
        policy_loss=SimpleNamespace(**of_policy),
    )  # fmt: skip
    names = {"dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl", "kl_cov": "kl_cov", "gmpo": "geo_mean", "gspo_token": "gspo"}
    for name, peers in names.items():
        mask = case.mask
        log_probs = case.log_probs.clone().requires_grad_()
        given = (old * mask, log_probs, advantages[:, None].expand(mask.shape), mask.double())
        theirs = verl.get_policy_loss_fn(peers)(*given, config=config)[0]
        (expected,) = torch.autograd.grad(theirs, log_probs)
        inputs = LossInputs(
            log_probs=log_probs, old_log_probs=old, advantages=advantages, mask=mask,
            entropy=torch.zeros_like(old), settings=settings,
        )  # fmt: skip
        objective = OBJECTIVES[name]
        assert isinstance(objective, Objective)
        outputs = objective(inputs)
        per_token, way = outputs.per_token, outputs.aggregation
        ours = aggregate(per_token, mask, way, accumulation=1.0, max_length=_TOKENS, tokens=mask.sum())
        (found,) = torch.autograd.grad(ours, log_probs)
        yield f"objective {name} ({peers})", expected, found


def rejections(correction: Any, case: Case) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The name of each mode that rejects rollouts, and the masks ``(N, T)`` of verl and of ours."""
    log_ratio = 0.3 * torch.sin(1e4 * case.log_probs)
    for name, low, high in (("seq_mean_k1", 0.97, 1.05), ("seq_mean_k3", None, 0.025)):
        spec = high if low is None else f"{1 / high}_{1 / low}"
        theirs = correction.compute_rollout_rejection_mask(log_ratio, case.holes.double(), name, spec)[0]
        given = (case.log_probs, case.log_probs - log_ratio, case.holes, name, low, high)
        yield f"rejection {name}", theirs, importance_weights(*given) * case.holes


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the comparison; returns the largest difference of each."""
    parser = study_parser(__doc__, "agreement")
    parser.add_argument("verl", type=Path, metavar="VERL", help="folder of a checkout of verl")
    options = placed(parser.parse_args(argv))
    if not (options.verl / "verl/trainer/ppo/core_algos.py").is_file():
        parser.error(f"'{options.verl}' is no checkout of verl: it has no verl/trainer/ppo/core_algos.py.")
    one_thread()
    verl, correction = load_verl(options.verl)
    worst: dict[str, float] = {}
    for seed in range(4 if options.quick else 20):
        case = draw(seed)
        for name, theirs, ours in [*compared(verl, case), *losses(verl, case), *rejections(correction, case)]:
            worst[name] = max(worst.get(name, 0.0), float((theirs - ours).abs().max()))
    for name, difference in worst.items():
        print(f"{name:52} {difference:.1e}")
    commit = run(["git", "-C", options.verl, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    save("agreement", {"verl": commit.stdout.strip() or None, "difference": rounded(worst)}, options.results)
    return worst


if __name__ == "__main__":
    main()
