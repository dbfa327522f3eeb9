"""Does `prior: text` find out by itself whether texts tell anything of the values?

    python -m studies.text_prior [--seeds SEED ...] [--quick]

Simulated rewards of 0 and 1 with known values: 256 prompts, 32 per batch, one rollout each, every prompt five times.
The logits of the values are normal with a standard deviation of 2, and all prompts rise by 1.5 over the run. In each
case the texts explain another share of the logits' variance; at 0 they tell nothing. There are two forms of texts:

- ``kinds``: eight kinds of problems. Those of a kind share six words and a difficulty, and differ in four words.
- ``words``: ten words of 60, each of which makes a prompt harder or easier.

Three beliefs of `basis_history` are compared, all with ``target="value"``: ``flat``; ``split 3/4``, for which texts
explain three quarters of the variance, whatever it sees; and ``weighed``, the whole of `prior: text`, which weighs that
split and others, 0 among them, by how well each predicts. Beside the squared error of the baseline at the first, the
second and third, and the later visits of prompts, the table has the squared error of the believed value at first
visits as a multiple of the variance that the belief gives itself (1 is calibrated).

Results: ``studies/results/text_prior.json``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines import BasisHistory
from benchmarks.common import one_thread
from studies.runs import placed, save_table, study_parser
from studies.simulated_mse import error, run

# Form of the texts, and the share of the logits' variance that they explain.
CASES = [("kinds", 0.0), ("words", 0.0), ("kinds", 0.4), ("kinds", 0.6), ("kinds", 0.8), ("words", 0.8)]
VOCABULARY = 60
DEVIATION = 2.0
CENTER = -0.75
RISE = 1.5
# Which visits of a prompt an error is averaged over, the first one being 0.
PARTS = {"first": range(1), "second and third": range(1, 3), "later": range(3, 1000)}


@dataclass(frozen=True)
class Scale:
    """Size of the simulation: prompts, prompts per batch, and visits of each."""

    prompts: int = 256
    batch: int = 32
    visits: int = 5


def texts_and_effects(form: str, prompts: int) -> tuple[list[str], Tensor]:
    """Texts, and what they add to the logits, ``(P,)``, of mean 0 and variance 1."""
    random = torch.randint(VOCABULARY, (prompts, 10))
    effects = torch.randn(VOCABULARY).double()
    if form == "kinds":
        kinds = torch.randint(8, (prompts,))
        # Words 0 to 47 are those of the kinds, the last twelve belong to none.
        random = torch.cat([6 * kinds[:, None] + torch.arange(6), 48 + random[:, 6:] % 12], dim=1)
        added = effects[kinds]
    else:
        added = effects[random].sum(dim=1)
    texts = [" ".join(f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in row) for row in random.tolist()]
    return texts, (added - added.mean()) / added.std()


def beliefs() -> dict[str, BasisHistory]:
    """The beliefs that are compared."""
    found = {name: BasisHistory(prior="text", target="value", fixed_range=(0, 1)) for name in ("split 3/4", "weighed")}
    fixed = found["split 3/4"]
    # Weights of 0 stay 0.
    fixed.log_weights = torch.log_softmax(torch.where(fixed.shares == 0.75, 0.0, -torch.inf).double(), dim=0)
    return {"flat": BasisHistory(prior="flat", target="value", fixed_range=(0, 1)), **found}


def simulate(form: str, share: float, seed: int, scale: Scale) -> dict[str, dict[str, float]]:
    """Of each belief, the mean squared error in each of `PARTS`, and the ratio of error to believed variance."""
    torch.manual_seed(seed)
    texts, effect = texts_and_effects(form, scale.prompts)
    own = torch.randn(scale.prompts).double()
    logits = CENTER + DEVIATION * (share**0.5 * effect + (1 - share) ** 0.5 * own)
    compared = beliefs()
    epoch = scale.prompts // scale.batch
    steps = epoch * scale.visits
    errors: dict[str, list[float]] = {name: [] for name in compared}
    believed: dict[str, list[tuple[float, float]]] = {name: [] for name in compared}

    def values_at(step: int) -> Tensor:
        return torch.sigmoid(logits + RISE * (step + 1) / steps)

    for truth, untold in run(values_at, scale.prompts, steps, scale.batch, group=1):
        batch = dataclasses.replace(untold, prompt_texts=[texts[int(name)] for name in untold.prompt_ids])
        told = dict(zip(batch.prompt_ids, batch.prompt_texts or [], strict=True))
        for name, belief in compared.items():
            # Before the first batch nothing is known of the common shift either.
            if 0 < batch.step < epoch:
                value, variance = belief.believed(batch.prompt_ids, told)
                believed[name].append((error(value, truth), float(variance.mean())))
            errors[name].append(error(belief.advantages(batch).baseline, truth))
            belief.update(batch)
    return {
        name: {
            **{part: mean(e for step, e in enumerate(found) if step // epoch in of) for part, of in PARTS.items()},
            "error / variance": sum(e for e, _ in believed[name]) / sum(v for _, v in believed[name]),
        }
        for name, found in errors.items()
    }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Simulate, print and save; returns a row for each case and belief, with what `simulate` found by seed."""
    parser = study_parser(__doc__, "text_prior")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    options = parser.parse_args(argv)
    placed(options, parser.parse_args([]))
    one_thread()
    scale = Scale(prompts=16, batch=8, visits=4) if options.quick else Scale()
    seeds = options.seeds[:1] if options.quick else options.seeds
    rows = []
    for form, share in CASES:
        runs = [simulate(form, share, seed, scale) for seed in seeds]
        means = {name: {part: mean(each[name][part] for each in runs) for part in runs[0][name]} for name in runs[0]}
        print(f"\n{form}, texts explain {share} of the variance: error; share of that of the better of the other two")
        for name, found in means.items():
            shown = [f"{part} {found[part]:.4f}" for part in found]
            shares = [found[part] / min(means["flat"][part], means["split 3/4"][part]) for part in PARTS]
            print(f"  {name:10}", *shown, " | ", *(f"{each:.3f}" for each in shares), flush=True)
            by_seed = {part: [each[name][part] for each in runs] for part in found}
            rows.append({"texts": form, "share": share, "belief": name, **by_seed})
    save_table("text_prior", {**dataclasses.asdict(scale), "seeds": seeds}, rows, options.results)
    return rows


if __name__ == "__main__":
    main()
