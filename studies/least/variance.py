"""Which baseline gives a rollout's gradient the least variance?

    python -m studies.least.variance [TASK=FOLDER ...] [--problems 128] [--samples 16] [--directions 16]

TASK is ``quickstart``, ``selection`` or ``smollm2``: whose problems the policy in FOLDER gets. Without any, the
policies are those of `MADE`, which are made in the output folder: warm starts, and after some steps of `basis_history`.
Those of SmolLM2 are the model of `make smollm2` and checkpoints of ``basis-rl train examples/smollm2/smollm2.yaml
--bf16 true --max_steps 160 --save_steps 40 --save_total_limit 4``.

For `--problems` problems, `--samples` rollouts each at temperature 1, the gradient of every token's log-probability is
projected onto random directions. The power of a rollout's gradient, ``E[(sum_t (r - b_t) s_t . d)^2]``, is compared
between baselines: all leave the expected gradient as it is, so they differ in power as in variance. Two kinds of
directions: the same size for every weight; and each weight divided by the root mean square of its gradient, as Adam's
steps are. A rollout counts at most as much as the 99 % quantile of all, since steps clip the gradient too.

- ``value``: each prompt's true value (unbiased, by pairs of the other rollouts). All powers are shares of its own.
- ``none``; ``batch mean``; with rewards of -1 and 1, and of 1 and 2, which for `none` are other baselines.
- ``constant of 64``: ``sum r W / sum W`` over the other 63 rollouts of a batch, W by the gradient's energies.
- ``c of energies``: ``V / (V + (1 - V) c)``, c the ratio of the mean logit energies of wrong and right rollouts.
- ``constant``, ``curve``, ``curve of tokens``: `basis_rl.baselines.optimal` after 100 batches of 64, with the mean of a
  prompt's other rollouts for V; ``curve, logit energies`` with OTB's energies in place of the gradient's.
- ``RLOO, G = 8``: the mean of seven other rollouts.

Results: ``studies/results/least_variance.json``; of given policies ``least_variance_TASK.json``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from basis_rl.baselines import build_baseline
from basis_rl.baselines.optimal import OptimalBaseline, Target
from basis_rl.engine import Sampling, prompt_tokens, sample
from basis_rl.functional.energy import logit_gradient_energy
from basis_rl.types import RolloutBatch
from benchmarks.common import one_thread
from benchmarks.trainers import quiet
from examples.quickstart.warm_start import save
from examples.smollm2 import problems as arithmetic
from studies.least.training import Scale, problems_of, reward_of
from studies.runs import placed, save_table, study_parser
from studies.selection import task as selection
from studies.small_policy import TOKENS, trainer_for
from studies.training import quickstart_model

ROWS = 64  # rollouts that a model is called with
BATCH, BATCHES = 64, 100
# Tasks, and the steps after which their policies are measured.
MADE = (("quickstart", 0), ("quickstart", 80), ("quickstart", 400), ("selection", 0), ("selection", 80))
CLIPPED = 0.99  # quantile of the rollouts' powers above which they are scaled down to it


@dataclass
class Rollouts:
    """N rollouts, n for each of P prompts in turn, and what is measured of them.

    Attributes:
        ids: prompt and rollout, padded on the right, ``(N, L)``.
        mask: ``(N, T)`` bool, tokens of the rollout.
        places: ``(N, T)`` of the tokens in `ids`.
        rewards: ``(N,)``, 0 or 1.
        energies: ``(N, T)``, of the gradient in what enters the final norm.
        logit_energies: ``(N, T)``.
        projections: kind of direction -> ``(N, T, K)``.
    """

    ids: Tensor
    mask: Tensor
    places: Tensor
    rewards: Tensor
    energies: Tensor
    logit_energies: Tensor
    projections: dict[str, Tensor]


def problems_and_reward(task: str, count: int) -> tuple[list[Any], list[str], Callable[..., Any], int]:
    """Prompts, golds, a reward of texts and golds, and how long a rollout may be."""
    if task == "selection":
        rows = selection.datasets(selection.TASKS["mixed"], 1024, 0)[0].select(range(count))
        return list(rows["prompt"]), list(rows["solution"]), selection.reward, selection.TOKENS
    if task == "smollm2":
        made = arithmetic.rows(1800)[400 : 400 + count]
        prompts = [[{"role": "user", "content": row["prompt"]}] for row in made]
        return prompts, [row["solution"] for row in made], arithmetic.last_number, TOKENS
    rows = problems_of(Scale(held_out=count), held_out=True)
    exact = reward_of("0/1")
    reward = lambda texts, golds: exact([[{"content": text}] for text in texts], golds)  # noqa: E731
    return list(rows["prompt"]), list(rows["solution"]), reward, TOKENS


def drawn(model: Any, tokenizer: Any, task: str, count: int, samples: int) -> Rollouts:
    """Sample, and grade."""
    prompts, golds, reward, length = problems_and_reward(task, count)
    tokens = [prompt_tokens(prompt, tokenizer, {}) for prompt in prompts]
    answers = dict(sample(model, tokenizer, tokens, Sampling(length), num_samples=samples, batch_size=512))
    rows, starts, rewards = [], [], []
    for i in range(len(tokens)):
        texts = [each.text.replace(tokenizer.eos_token, "") for each in answers[i]]
        rewards += reward(texts, [golds[i]] * samples)
        rows += [torch.tensor([*tokens[i], *each.token_ids]) for each in answers[i]]
        starts += [len(tokens[i])] * samples
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    ends = torch.tensor([len(row) for row in rows])[:, None]
    places = torch.tensor(starts)[:, None] + torch.arange(length)
    mask = places < ends
    places = places.clamp(max=ids.shape[1] - 1)
    nothing = torch.zeros(mask.shape)
    return Rollouts(ids, mask, places, torch.tensor(rewards), nothing, nothing.clone(), {})


def log_probs(model: Any, weights: dict[str, Tensor], rollouts: Rollouts, rows: slice) -> tuple[Tensor, Tensor]:
    """``(B, T)`` log-probabilities of the tokens, 0 outside the mask; and ``(B, T, V)`` of all tokens."""
    ids = rollouts.ids[rows, : int(rollouts.places[rows].max()) + 1]
    scores = functional_call(model, weights, kwargs={"input_ids": ids, "use_cache": False}).logits.float()
    places = rollouts.places[rows]
    before = scores.gather(1, (places - 1)[:, :, None].expand(-1, -1, scores.shape[2])).log_softmax(-1)
    chosen = before.gather(2, ids.gather(1, places)[:, :, None])[:, :, 0]
    return torch.where(rollouts.mask[rows], chosen, 0.0), before


def slices(count: int) -> Iterator[slice]:
    return (slice(start, min(count, start + ROWS)) for start in range(0, count, ROWS))


def measure_energies(model: Any, rollouts: Rollouts) -> dict[str, Tensor]:
    """Fill in both kinds of energies; returns each weight's mean square gradient over rollouts.

    With random signs of the rollouts, the square of their summed gradient is the sum of their squares in expectation.
    """
    squares = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    entered: list[Tensor] = []
    hook = model.base_model.norm.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    for rows in slices(len(rollouts.ids)):
        entered.clear()
        model.zero_grad()
        found, before = log_probs(model, dict(model.named_parameters()), rollouts, rows)
        signs = torch.randint(0, 2, (len(found), 1)) * 2.0 - 1.0
        entered[0].retain_grad()
        (signs * found).sum().backward()
        gradient = entered[0].grad
        assert gradient is not None
        norms = gradient.float().square().sum(-1).gather(1, rollouts.places[rows] - 1)
        rollouts.energies[rows] = norms * rollouts.mask[rows]
        wide = before.detach().exp()
        energy = logit_gradient_energy(found.detach(), wide.square().sum(-1))
        rollouts.logit_energies[rows] = energy * rollouts.mask[rows]
        for name, p in model.named_parameters():
            if p.grad is not None:
                squares[name] += p.grad.float().square() / len(rollouts.ids)
    hook.remove()
    model.zero_grad()
    return squares


def project(model: Any, rollouts: Rollouts, scales: dict[str, Tensor] | None, directions: int) -> Tensor:
    """``(N, T, K)``: the derivative of each token's log-probability along random directions."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    for _ in range(directions):
        noise = {name: torch.randn(p.shape, generator=generator) for name, p in weights.items()}
        if scales is not None:
            noise = {name: noise[name] * scales[name] for name in noise}
        noise = {name: noise[name].to(p.dtype) for name, p in weights.items()}
        chunks = []
        for rows in slices(len(rollouts.ids)):
            score = partial(_log_probs_of, model=model, rollouts=rollouts, rows=rows)
            chunks.append(torch.func.jvp(score, (weights,), (noise,))[1])
        found.append(torch.cat(chunks))
    return torch.stack(found, dim=2).double()


def _log_probs_of(weights: dict[str, Tensor], model: Any, rollouts: Rollouts, rows: slice) -> Tensor:
    return log_probs(model, weights, rollouts, rows)[0]


def power(rewards: Tensor, baseline: Tensor, projections: Tensor) -> float:
    """``E[(sum_t (r - b_t) s_t . d)^2]``; `baseline` is ``(N,)`` or ``(N, T)``."""
    away = rewards[:, None] - (baseline if baseline.ndim == 2 else baseline[:, None])
    return float((away[:, :, None] * projections).sum(dim=1).square().mean())


def learnt(
    rollouts: Rollouts, values: Tensor, target: Target, degree: int, energies: Tensor, generator: torch.Generator
) -> Tensor:
    """The baseline of all rollouts after batches of one rollout for each of 64 prompts; `values` are ``(P, n)``."""
    found = OptimalBaseline(target, degree)
    prompts, samples = values.shape
    flat = values.flatten()
    for _ in range(BATCHES):
        rows = torch.randperm(prompts, generator=generator)[:BATCH] * samples
        rows = rows + torch.randint(samples, rows.shape, generator=generator)
        rewards = rollouts.rewards[rows].double()
        batch = RolloutBatch(
            rewards=rewards.float(),
            group_ids=torch.arange(len(rows)),
            prompt_ids=[str(row) for row in rows.tolist()],
            action_mask=rollouts.mask[rows],
            gradient_energies=energies[rows],
        )
        found.learn(flat[rows], rewards, batch)
    return found(flat, rollouts.mask)[0]


def baselines_of(rollouts: Rollouts, samples: int) -> dict[str, Tensor]:
    """The baseline of each rollout, ``(N,)`` or ``(N, T)``, by the names of the table."""
    generator = torch.Generator().manual_seed(0)
    r = rollouts.rewards.double().reshape(-1, samples)
    others = r.sum(dim=1, keepdim=True) - r
    mean = float(r.mean())
    # Drawn a little to the mean of all, as a belief is.
    values = (others + 2 * mean) / (samples - 1 + 2)
    flat = r.flatten()
    weights = rollouts.energies.sum(dim=1).double()
    logits = rollouts.logit_energies.sum(dim=1).double()
    c = float(logits[flat == 0].mean() / logits[flat == 1].mean())
    of_64 = torch.zeros_like(flat)
    for row in range(len(flat)):
        chosen = torch.randperm(len(flat), generator=generator)[: BATCH - 1]
        of_64[row] = (weights[chosen] * flat[chosen]).sum() / weights[chosen].sum().clamp(min=1e-12)
    seven = torch.stack([torch.randperm(samples - 1, generator=generator)[:7] for _ in range(len(flat))])
    own = (torch.arange(len(flat)) % samples)[:, None]
    group = r[torch.arange(len(flat)) // samples].gather(1, seven + (seven >= own)).mean(dim=1)
    learn = partial(learnt, rollouts, values, generator=generator)
    return {
        "none": torch.zeros_like(flat),
        "none, -1 and 1": torch.full_like(flat, 0.5),
        "none, 1 and 2": torch.full_like(flat, -1.0),
        "batch mean": torch.full_like(flat, mean),
        "RLOO, G = 8": group,
        "belief": values.flatten(),
        "constant of 64": of_64,
        "c of energies": values.flatten() / (values.flatten() + (1 - values.flatten()) * c),
        "constant": learn(target="optimal", degree=0, energies=rollouts.energies),
        "curve": learn(target="optimal", degree=2, energies=rollouts.energies),
        "curve, logit energies": learn(target="optimal", degree=2, energies=rollouts.logit_energies),
        "curve of tokens": learn(target="optimal_token", degree=2, energies=rollouts.energies),
    }


def of_value(rewards: Tensor, projections: Tensor, samples: int) -> float:
    """The power with each prompt's true value: V and V^2 by their unbiased estimates from the other rollouts."""
    r = rewards.double().reshape(-1, samples)
    others = r.sum(dim=1, keepdim=True) - r
    value = others / (samples - 1)
    square = others * (others - 1) / ((samples - 1) * (samples - 2))
    norms = projections.sum(dim=1).square().mean(dim=1)
    return float(((r - 2 * r * value + square).flatten() * norms).mean())


def ratios_by_value(rollouts: Rollouts, norms: Tensor, samples: int) -> dict[str, float | None]:
    """Mean `norms` ``(N,)`` of wrong rollouts over that of right ones, of all and of prompts by their value."""
    r = rollouts.rewards.double().reshape(-1, samples)
    value = ((r.sum(dim=1, keepdim=True) - r) / (samples - 1)).flatten()
    flat = r.flatten()
    found: dict[str, float | None] = {}
    for low, high in ((0.0, 1.01), (0.0, 0.15), (0.15, 0.4), (0.4, 0.7), (0.7, 1.01)):
        wrong, right = (norms[(value >= low) & (value < high) & (flat == each)] for each in (0, 1))
        enough = min(len(wrong), len(right)) >= 8
        found[f"{low:g} to {min(high, 1):g}"] = float(wrong.mean() / right.mean()) if enough else None
    return found


def measure(name: str, folder: Path, count: int, samples: int, directions: int) -> Iterator[dict[str, Any]]:
    """A row for each kind of direction."""
    set_seed(0)
    # A real language model takes hours in float32 on a CPU.
    model, tokenizer = loaded(folder, torch.bfloat16 if name == "smollm2" else torch.float32)
    rollouts = drawn(model, tokenizer, name, count, samples)
    squares = measure_energies(model, rollouts)
    # What never had a gradient has none to project.
    least = 1e-6 * torch.cat([each.flatten() for each in squares.values()]).mean()
    adam = {key: each.clamp(min=float(least)).rsqrt() for key, each in squares.items()}
    baselines = baselines_of(rollouts, samples)
    rewards = rollouts.rewards.double()
    for kind, scales in (("plain", None), ("Adam", adam)):
        projections = project(model, rollouts, scales, directions)
        norms = projections.sum(dim=1).square().mean(dim=1)
        # As a step's gradient is clipped: one token of a kind that was never trained can outweigh all others.
        most = norms.quantile(CLIPPED)
        projections = projections * (most / norms.clamp(min=most)).sqrt()[:, None, None]
        norms = norms.clamp(max=most)
        value = of_value(rewards, projections, samples)
        # The product of two halves of the rollouts has no noise in expectation.
        whole = (rewards - rewards.mean())[:, None] * projections.sum(dim=1)
        halves = [whole[half::2].mean(dim=0) for half in (0, 1)]
        signal = max(0.0, float((halves[0] * halves[1]).mean()))
        powers = {key: power(rewards, b, projections) for key, b in baselines.items()}
        yield {
            "task": name,
            "policy": folder.name,
            "directions": kind,
            "right": float(rewards.mean()),
            "wrong over right": ratios_by_value(rollouts, norms, samples),
            "the same, gradient energies": ratios_by_value(rollouts, rollouts.energies.sum(dim=1), samples),
            "the same, logit energies": ratios_by_value(rollouts, rollouts.logit_energies.sum(dim=1), samples),
            "noise of a batch of 64 with the value": value / (value + BATCH * signal),
            "power": {key: each / value for key, each in powers.items()},
        }


def made(task: str, steps: int, output: Path) -> Path:
    """The folder of a policy after so many steps of 64 rollouts, each step from where the last ones ended."""
    folder = output / f"{task}{steps}"
    if (folder / "config.json").is_file():
        return folder
    before = max((each for name, each in MADE if name == task and each < steps), default=None)
    if task == "selection":
        prompts = selection.datasets(selection.TASKS["mixed"], 1024, 0)[0]
        reward: Any = selection.reward
        length, rate = selection.TOKENS, 6e-4
    else:
        prompts = problems_of(Scale(), held_out=False)
        reward = reward_of("0/1")
        length, rate = TOKENS, 3e-4
    if before is None:
        if task == "selection":
            selection.warm_model(prompts, "mixed", 0, folder, 1500)
        else:
            quickstart_model(prompts, 0, folder, until=Scale.warm_start[0], max_steps=Scale.warm_start[1])
        return folder
    model, tokenizer = loaded(made(task, before, output))
    set_seed(0)
    trainer = trainer_for(
        model, tokenizer, prompts, build_baseline("basis_history"), output / "run", reward, num_generations=1,
        steps_per_generation=1, per_device_train_batch_size=BATCH, max_steps=steps - before, learning_rate=rate,
        seed=steps, max_completion_length=length, overwrite_output_dir=True,
    )  # fmt: skip
    quiet(trainer).train()
    save(model, tokenizer, folder)
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Model and tokenizer; with an attention that has forward derivatives."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    return model, AutoTokenizer.from_pretrained(folder, padding_side="left")


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print and save."""
    parser = study_parser(__doc__, "least_variance")
    parser.add_argument("policies", nargs="*", metavar="TASK=FOLDER")
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--directions", type=int, default=16)
    options = placed(parser.parse_args(argv))
    one_thread()
    rows: list[dict[str, Any]] = []
    for policy in options.policies or [f"{task}={made(task, steps, options.output)}" for task, steps in MADE]:
        task, folder = policy.split("=", 1)
        for row in measure(task, Path(folder), options.problems, options.samples, options.directions):
            rows.append(copy.deepcopy(row))
            told = ", ".join(f"{key} {each:.3f}" for key, each in row["power"].items())
            print(f"{policy}, {row['directions']}: {row['right']:.2f} right; {told}", flush=True)
    size: Sequence[str] = ("problems", "samples", "directions")
    name = f"least_variance_{rows[0]['task']}" if options.policies else "least_variance"
    save_table(name, {key: getattr(options, key) for key in size}, rows, options.results)
    return rows


if __name__ == "__main__":
    main()
