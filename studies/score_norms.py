"""Is the value the baseline with the least variance?

    python -m studies.score_norms [MODEL ...] [--quick]

The papers of BASIS and similar methods estimate the value V. The power of a rollout's gradient, ``E[(r - b)^2 |S|^2]``
with the score ``S = d log pi(y) / d theta``, is least at ``b* = E[r |S|^2] / E[|S|^2]`` (Weaver and Tao; Eq. 21 of the
OTB paper). This is V only if the scores of right and wrong rollouts have the same size. With ``rho``, the mean
``|S|^2`` of wrong rollouts over that of right ones, it is ``V / (V + rho (1 - V))``. A policy with only two possible
rollouts has ``rho = (V / (1 - V))^2`` and so ``b* = 1 - V``: for V above 2/3, no baseline at all is then better than V.
The true norms are compared with the energies ``w = 1 - 2 pi(y) + sum pi^2``, summed over the rollout, which OTB uses in
their place (Eq. 7). Over all prompts, rho also reflects the difference between hard and easy prompts, since hard ones
have most of the wrong rollouts; within a prompt it does not.

Everything is measured exactly, on the models that `studies.quickstart_seeds` and `studies.policy.study --worked` leave
in ``runs/``, or on other models, with the quickstart's held-out problems.

Results: ``studies/results/score_norms.json``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast, set_seed

from basis_rl.data import load_prompts
from basis_rl.engine import Sampling, prompt_tokens, sample
from basis_rl.functional.energy import logit_gradient_energy
from basis_rl.recipe.file import parse_recipe
from basis_rl.rewards import MathVerifyReward
from benchmarks.common import one_thread, save
from studies import worked_sums
from studies.runs import placed, rounded, study_parser
from studies.training import RECIPE

FOLDERS = [
    *(Path(f"runs/quickstart-seed{seed}/{stage}") for seed in range(3) for stage in ("warm_start", "basis")),
    *(Path(f"runs/policy_study_worked/seed{seed}/warm_start") for seed in range(3)),
]


def norm_and_energy(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> tuple[float, float]:
    """``|S|^2`` of one rollout at temperature 1, over all parameters; and the sum of its energies."""
    ids = torch.tensor([[*prompt, *answer]])
    scores = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    log_probs = scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
    gradients = torch.autograd.grad(log_probs.sum(), [p for p in model.parameters() if p.requires_grad])
    energy = logit_gradient_energy(log_probs.detach(), scores.detach().exp().square().sum(-1)).sum()
    return sum(float(g.square().sum()) for g in gradients), float(energy)


def powers(rewards: Tensor, norms: Tensor, energies: Tensor) -> dict[str, Any]:
    """The power of the gradient with each baseline, as a share of the power without a baseline.

    Args:
        rewards: ``(P, n)``, 0 or 1. A prompt's value is estimated from its other n - 1 rewards: without bias in the
            row ``value``, by their mean in the rows with rho, by their mean weighted with `norms` in ``own b*``.
        norms: ``(P, n)``, squared norms of the scores.
        energies: ``(P, n)``, the approximation of `norms`.

    Raises:
        ValueError: all rollouts are right, or all are wrong.
    """
    if not 0 < float(rewards.mean()) < 1:
        raise ValueError(
            "score_norms needs right and wrong rollouts, but all are alike. Use another model, or more --problems."
        )
    r, w, n = rewards.double(), norms.double(), rewards.shape[1]
    others = r.sum(1, keepdim=True) - r
    value, square = others / (n - 1), others * (others - 1) / ((n - 1) * (n - 2))  # unbiased for V and V^2
    rho, proxy = (float(x[r == 0].mean() / x[r == 1].mean()) for x in (w, energies.double()))
    baselines = {
        "none": torch.zeros_like(r),
        "batch mean": r.mean().expand_as(r),
        "best constant": ((w * r).sum() / w.sum()).expand_as(r),
        "own b*": ((w * r).sum(1, keepdim=True) - w * r) / (w.sum(1, keepdim=True) - w),
        "value and rho": value / (value + rho * (1 - value)),
        "value and rho of energies": value / (value + proxy * (1 - value)),
    }
    power = {name: float(((r - b).square() * w).mean()) for name, b in baselines.items()}
    power["value"] = float(((r - 2 * r * value + square) * w).mean())
    return {
        "mean V": float(r.mean()),
        "rho": rho,
        "rho of energies": proxy,
        **within_prompts(r, w),
        "best constant": float((w * r).sum() / w.sum()),
        "power": {name: x / power["none"] for name, x in power.items()},
    }


def within_prompts(rewards: Tensor, norms: Tensor) -> dict[str, float]:
    """Geometric mean of rho within a prompt, over the prompts with right and wrong rollouts; and their number."""
    right = rewards.sum(1)
    mixed = (right > 0) & (right < rewards.shape[1])
    r, w, right = rewards[mixed], norms[mixed], right[mixed]
    ratios = (w * (1 - r)).sum(1) / (r.shape[1] - right) * right / (w * r).sum(1)
    return {"rho within a prompt": float(ratios.log().mean().exp()), "mixed prompts": int(mixed.sum())}


def drawn_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Dataset,
    samples: int,
    length: int,
    reward: Callable[..., Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, norms, energies and lengths of `samples` rollouts per problem, ``(P, n)`` each."""
    set_seed(0)
    tokens = [prompt_tokens(prompt, tokenizer, {}) for prompt in problems["prompt"]]
    rewards, norms, energies, lengths = (torch.zeros(len(tokens), samples) for _ in range(4))
    drawn = sample(model, tokenizer, tokens, Sampling(length), num_samples=samples)
    for i, answers in tqdm(drawn, total=len(tokens), unit="problem", mininterval=5):
        texts, golds = [answer.text for answer in answers], [problems[i]["solution"]] * samples
        scores = reward(prompts=[problems[i]["prompt"]] * samples, completions=texts, solution=golds)
        assert None not in scores, golds[0]
        rewards[i] = torch.tensor(scores)
        both = [norm_and_energy(model, tokens[i], answer.token_ids) for answer in answers]
        norms[i], energies[i] = torch.tensor(both).T
        lengths[i] = torch.tensor([len(answer.token_ids) for answer in answers])
    return rewards, norms, energies, lengths


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: Dataset, samples: int, length: int
) -> dict[str, Any]:
    """`powers` of `samples` rollouts per problem: for the sum over a rollout's tokens, and for the mean over them."""
    reward = MathVerifyReward(num_workers=1)
    rewards, norms, energies, lengths = drawn_answers(model, tokenizer, problems, samples, length, reward)
    reward.close()
    mean = powers(rewards, norms / lengths**2, energies / lengths**2)
    return {**powers(rewards, norms, energies), "mean over tokens": mean}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the study; returns its results by model."""
    parser = study_parser(__doc__, "score_norms")
    parser.add_argument("folders", nargs="*", type=Path, default=FOLDERS, help="folders of models")
    parser.add_argument("--problems", type=int, default=100, help="number of problems (100)")
    parser.add_argument("--samples", type=int, default=16, help="rollouts per problem (16)")
    options = placed(parser.parse_args(argv), parser.parse_args([]))
    if options.quick:
        options.problems, options.samples = 40, 4
    missing = [str(folder) for folder in options.folders if not (folder / "config.json").is_file()]
    if missing:
        made = "`python -m studies.quickstart_seeds` and `python -m studies.policy.study --worked`"
        parser.error(f"There is no model in {', '.join(missing)}. {made} make the models in runs/.")
    one_thread()
    recipe = parse_recipe([RECIPE])
    problems = load_prompts(recipe.data, conversational=True, held_out=True)
    problems = problems.shuffle(seed=0).select(range(options.problems))
    found: dict[str, dict[str, Any]] = {}
    for folder in options.folders:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        row = found[str(folder)] = measure(model, tokenizer, problems, options.samples, worked_sums.TOKENS)
        shares = ", ".join(f"{name} {x:.2f}" for name, x in row["power"].items())
        rho = f"rho {row['rho']:.1f} (within {row['rho within a prompt']:.1f}, energies {row['rho of energies']:.1f})"
        print(f"{folder}: V {row['mean V']:.2f}, {rho}, power: {shares}", flush=True)
    raw = {"problems": options.problems, "samples": options.samples, "models": found}
    save("score_norms", rounded(raw), options.results)
    return found


if __name__ == "__main__":
    main()
