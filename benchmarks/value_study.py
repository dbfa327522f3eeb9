"""How near do baselines come to a real policy's true values?   python -m benchmarks.value_study [--quick]

BASIS Sec. 5.1 and App. A (Figs. 2, 3, 4) at small scale. The quickstart's model learns sums by GRPO with 8 rollouts a
prompt; at three checkpoints of that run (early, middle, late) every prompt of a pool is rolled out 256 times for its
true value, and 64 times more for the estimators. The value table is of 32 rollouts of the policy before the run.
Batches have 64 prompts. History (`bv_blend`, `basis_history`) is what the run itself saw before the checkpoint.

Rollouts are kept in ``--output`` (runs/value_study); a second call only analyses them anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from basis_rl.baselines import Basis, BasisHistory, BatchMean, BVBlend, DrGrpo, Grpo, Rloo
from basis_rl.rewards import MathVerifyReward
from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable
from benchmarks import drawing
from benchmarks import value_analysis as va
from benchmarks.common import RESULTS, one_thread, rounded, save
from benchmarks.small_policy import draw, problems, trainer_for, warm_policy

GROUP, SPREADS, REPEATS, MANY = 8, (0.20, 0.23, 0.26, 0.29, 0.32), 10, 200
EDGES = (0.206, 0.226, 0.246, 0.266, 0.287, 0.307)  # the paper's bins of a batch's standard deviation of V
STAGES = ("early", "middle", "late")


@dataclass(frozen=True)
class Plan:
    """What the policy and its rollouts are made of; rollouts that were kept are used for the same plan only."""

    seed: int = 0
    problems: int = 20000  # that the warm start sees
    trained: int = 2048  # that RL trains on
    pool: int = 512  # of these, whose values are estimated
    until: float = 0.45
    prompts: int = 64  # a generation batch, with 8 rollouts each
    checkpoints: tuple[int, ...] = (20, 60, 120)  # generation batches
    learning_rate: float = 3e-4
    table: int = 32
    oracle: int = 256
    samples: int = 64


QUICK = Plan(
    problems=300, trained=32, pool=24, until=0.0, prompts=4, checkpoints=(1, 2, 3), table=4, oracle=8, samples=8
)  # fmt: skip


# What `--gentle` changes: fewer rollouts too, since it is a second look.
GENTLE: dict[str, Any] = {
    "learning_rate": 3e-5,
    "trained": 1024,
    "pool": 256,
    "samples": 32,
    "checkpoints": (10, 30, 60),
}


class Recorder(Grpo):
    """GRPO's baseline, which keeps the batches it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[list[str], np.ndarray]] = []

    def update(self, batch: RolloutBatch) -> None:
        rewards = batch.rewards.reshape(-1, GROUP).numpy().astype(np.uint8)
        self.batches.append((batch.prompt_ids[::GROUP], rewards))


class AtCheckpoints(TrainerCallback):
    """Calls `look` when the policy has learnt from so many generation batches."""

    def __init__(self, recorder: Recorder, batches: tuple[int, ...], look: Any) -> None:
        self.recorder, self.left, self.look = recorder, list(batches), look

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.left and len(self.recorder.batches) >= self.left[0]:
            self.look(self.left.pop(0))


def make_rollouts(plan: Plan, output: Path) -> dict[str, Any]:
    """Train, and draw what the analysis needs: plain arrays and lists."""
    seconds = {"warm start": time.process_time()}
    everything = problems(plan.problems)
    model, tokenizer = warm_policy(everything, plan.seed, plan.until)
    seconds["warm start"] = time.process_time() - seconds["warm start"]
    trained = everything.select(range(plan.trained))
    pool, reward = trained.select(range(plan.pool)), MathVerifyReward(num_workers=1)
    began = time.process_time()
    found: dict[str, Any] = {"ids": trained["prompt_id"], "family": trained["family"]}
    found["reference"] = draw(model, tokenizer, trained, plan.table, reward, "value table")
    recorder = Recorder()

    def look(batches: int) -> None:
        stage = STAGES[plan.checkpoints.index(batches)]
        training = model.training
        found[stage] = draw(model, tokenizer, pool, plan.oracle + plan.samples, reward, f"{stage}: batch {batches}")
        model.train(training)

    trainer = trainer_for(
        model, tokenizer, trained, recorder, output / "run", reward,
        [AtCheckpoints(recorder, plan.checkpoints, look)],
        num_generations=GROUP, per_device_train_batch_size=plan.prompts * GROUP // 2,
        max_steps=2 * plan.checkpoints[-1], learning_rate=plan.learning_rate, seed=plan.seed,
    )  # fmt: skip
    trainer.train()
    if trainer.stop_on_signal.stopped:
        raise SystemExit("Stopped by a signal; nothing was kept.")
    seconds["training and rollouts"] = time.process_time() - began
    reward.close()
    found["history"] = recorder.batches
    found["seconds"] = {key: round(value, 1) for key, value in seconds.items()}
    return found


def kept_rollouts(plan: Plan, output: Path) -> dict[str, Any]:
    """Those of an earlier call with the same plan, or new ones."""
    path, key = output / "rollouts.npz", json.dumps(asdict(plan))
    if path.is_file():
        with np.load(path) as kept:
            if str(kept["plan"]) == key:
                found: dict[str, Any] = {k: kept[k] for k in ("reference", *STAGES)}
                found |= {k: kept[k].tolist() for k in ("ids", "family")}
                found["seconds"] = json.loads(str(kept["seconds"]))
                history = zip(kept["history_ids"].tolist(), kept["history_rewards"], strict=True)
                found["history"] = list(history)
                return found
    found = make_rollouts(plan, output)
    output.mkdir(parents=True, exist_ok=True)
    arrays = {k: v for k, v in found.items() if k not in ("history", "seconds")}
    np.savez_compressed(
        path, plan=key, seconds=json.dumps(found["seconds"]),
        history_ids=np.array([ids for ids, _ in found["history"]]),
        history_rewards=np.stack([rewards for _, rewards in found["history"]]), **arrays,
    )  # fmt: skip
    return found


def reference_table(rollouts: dict[str, Any]) -> ValueTable:
    rewards = zip(rollouts["ids"], rollouts["reference"].astype(float).tolist(), strict=True)
    return ValueTable.from_rewards(dict(rewards))


def estimators(table: ValueTable, rollouts: dict[str, Any], batches: int) -> list[va.Estimator]:
    """All of the study, as they stand after so many batches of the run."""
    history = rollouts["history"][:batches]
    families = dict(zip(rollouts["ids"], rollouts["family"], strict=True))
    blend = va.replay(BVBlend(families), history)
    remembers = va.replay(BasisHistory(table), [(ids, rewards[:, :1]) for ids, rewards in history])
    rows = [va.Estimator("batch mean", BatchMean(), 1)]
    rows += [va.Estimator(f"group mean {g}", DrGrpo(), g) for g in (1, 2, 4, 8)]
    rows += [va.Estimator(f"rloo {g}", Rloo(), g) for g in (2, 4, 8)]
    for weighting in ("unb", "vop", "rvg"):
        rows.append(va.Estimator(f"basis {weighting}", Basis(table, weighting), 1))
        rows.append(va.Estimator(f"basis {weighting}, no smoothing", Basis(table, weighting, smoothing=0.0), 1))
    literal = Basis(table, smoothing=0.0, calibration="literal")
    return [
        *rows,
        va.Estimator("basis unb, literal Eq. 6", literal, 1),
        va.Estimator("basis unb, likelihood", Basis(table, calibration="likelihood"), 1),
        va.Estimator("basis_history", remembers, 1),
        va.Estimator("bv_blend 1", blend, 1),
        va.Estimator("bv_blend 8", blend, 8),
    ]


def analyse(plan: Plan, rollouts: dict[str, Any], repeats: int, many: int) -> dict[str, Any]:
    """Every number of the study."""
    table, ids = reference_table(rollouts), rollouts["ids"][: plan.pool]
    size = min(64, plan.pool // 2)
    stages, curves = {}, {}
    for stage, batches in zip(STAGES, plan.checkpoints, strict=True):
        truth = rollouts[stage][:, : plan.oracle].mean(axis=1)
        samples = rollouts[stage][:, plan.oracle :]
        rows, natural = estimators(table, rollouts, batches), np.full(len(ids), 1 / len(ids))
        paper = va.tilt_to(truth, 0.26)
        common = {"size": size, "seed": plan.seed}
        spread = [
            va.measure(rows, ids, truth, samples, va.tilt_to(truth, s), repeats=many // 5, **common) for s in SPREADS
        ]
        stages[stage] = {
            "generation batches": batches,
            "mean V": float(truth.mean()),
            "spread of V": float(truth.std()),
            "drift": va.drift(rollouts["reference"][: plan.pool], rollouts[stage][:, : plan.oracle]),
            "error of the oracle": float((truth * (1 - truth)).mean() / (plan.oracle - 1)),
            "natural": va.measure(rows, ids, truth, samples, natural, repeats=repeats, **common),
            "natural, many": va.measure(rows, ids, truth, samples, natural, repeats=many, size=size, seed=1),
            "spread 0.26": va.measure(rows, ids, truth, samples, paper, repeats=repeats, **common),
            "by spread": by_spread(rows, spread),
        }
        curves[stage] = curves_over_beta(table, ids, truth, samples, size, many // 5, plan.seed)
    return {"stages": stages, "beta": curves, "age of the table": by_table(plan, rollouts, size, many)}


def by_table(plan: Plan, rollouts: dict[str, Any], size: int, repeats: int) -> dict[str, dict[str, float]]:
    """MSE of `basis` at each stage (rows) with a table of the reference and of each stage up to it (columns).

    Those tables and the estimators share the rollouts that are not the oracle's: half for each.
    """
    ids, half = rollouts["ids"][: plan.pool], plan.samples // 2
    natural, found = np.full(len(ids), 1 / len(ids)), {}
    for now, stage in enumerate(STAGES):
        truth = rollouts[stage][:, : plan.oracle].mean(axis=1)
        samples, rows = rollouts[stage][:, plan.oracle : plan.oracle + half], [va.Estimator("none", BatchMean(), 1)]
        for name in ("reference", *STAGES[: now + 1]):
            rewards = rollouts[name][: plan.pool, -half:].astype(float).tolist()
            table = ValueTable.from_rewards(dict(zip(ids, rewards, strict=True)))
            rows.append(va.Estimator(name, Basis(table), 1))
        measured = va.measure(rows, ids, truth, samples, natural, size=size, repeats=repeats, seed=2)
        estimators: Any = measured["estimators"]
        found[stage] = {name: float(np.mean(row["mse"])) for name, row in estimators.items()}
    return found


def by_spread(rows: list[va.Estimator], measured: list[dict[str, Any]]) -> dict[str, Any]:
    """MSE in the paper's bins of a batch's spread, over all the mixtures' batches together."""
    spreads = [s for one in measured for s in one["spread"]]
    mse = {e.name: [x for one in measured for x in one["estimators"][e.name]["mse"]] for e in rows}
    return {
        "edges": EDGES,
        "batches": np.histogram(spreads, EDGES)[0].tolist(),
        "least and greatest": [min(spreads), max(spreads)],
        "mse": {name: va.bin_means(spreads, errors, EDGES) for name, errors in mse.items()},
    }


def curves_over_beta(
    table: ValueTable, ids: list[str], truth: np.ndarray, samples: np.ndarray, size: int, batches: int, seed: int
) -> dict[str, Any]:
    """Mean over batches of the initial and the refined estimator's MSE at each beta, and the betas that were chosen."""
    rng = np.random.default_rng(seed)
    weights, basis = np.full(len(ids), 1 / len(ids)), Basis(table)
    curves: dict[str, list[np.ndarray]] = {"initial": [], "refined": []}
    chosen, at_chosen = [], []
    for _ in range(batches):
        rows = va.draw_batch(rng, weights, size)
        rewards, names = va.draw_rewards(rng, samples, rows, 1), [ids[row] for row in rows]
        for key, curve in va.beta_curves(table, names, rewards[:, 0], truth[rows], basis.smoothing).items():
            curves[key].append(curve)
        result = basis.advantages(va.rollout_batch(names, rewards))
        chosen.append(result.metrics["beta"])
        at_chosen.append(float(((result.baseline.numpy() - truth[rows]) ** 2).mean()))
    means = {key: np.mean(rows, axis=0) for key, rows in curves.items()}
    grid = basis.betas.numpy()
    return {
        **{key: curve.tolist() for key, curve in means.items()},
        "best": {key: float(grid[curve.argmin()]) for key, curve in means.items()},
        "least": {key: float(curve.min()) for key, curve in means.items()},
        "chosen": chosen,
        "mse at the chosen": float(np.mean(at_chosen)),
    }


def shortened(results: dict[str, Any]) -> dict[str, Any]:
    """The results with mean and standard error in place of the numbers of many batches."""
    stages = {}
    for stage, found in results["stages"].items():
        many = found["natural, many"]
        short = {
            name: {**row, **{key: mean_and_error(row[key]) for key in ("mse", "at_bounds")}}
            for name, row in many["estimators"].items()
        }
        stages[stage] = {**found, "natural, many": {"batches": len(many["spread"]), "estimators": short}}
    return {**results, "stages": stages}


def mean_and_error(numbers: list[float]) -> list[float]:
    return [float(np.mean(numbers)), float(np.std(numbers, ddof=1) / len(numbers) ** 0.5)]


def show(results: dict[str, Any]) -> None:
    for stage, row in results["age of the table"].items():
        print(f"{stage}: MSE of basis by the table's policy: " + ", ".join(f"{k} {v:.4f}" for k, v in row.items()))
    for stage, found in results["stages"].items():
        print(f"\n{stage}: mean V {found['mean V']:.3f}, spread {found['spread of V']:.3f}, drift {found['drift']}, "
              f"oracle error {found['error of the oracle']:.4f}; MSE, 0/1 share")  # fmt: skip
        for name in found["natural"]["estimators"]:
            cells = [found[key]["estimators"][name] for key in ("natural", "natural, many", "spread 0.26")]
            text = "   ".join(f"{np.mean(c['mse']):.4f} {np.mean(c['at_bounds']):4.0%}" for c in cells)
            bins = " ".join(f"{x:.4f}" for x in found["by spread"]["mse"][name])
            print(f"  {name:28} {text}   {bins}")
        chosen = sorted(results["beta"][stage]["chosen"])
        print(f"  beta: best {results['beta'][stage]['best']}, chosen (median) {chosen[len(chosen) // 2]:.2f}")


DRAWN = (
    "basis unb", "basis_history", "batch mean", "group mean 8", "rloo 8", "bv_blend 8", "group mean 4", "group mean 2",
    "group mean 1", "basis unb, no smoothing",
)  # fmt: skip


def plot(results: dict[str, Any], folder: Path, name: str, stage: str = "middle") -> None:
    """Figs. 3 and 2 of the paper, for the middle checkpoint and for all."""
    found = results["stages"][stage]
    labels = ["0–0.2", "0.2–0.4", "0.4–0.6", "0.6–0.8", "0.8–1"]
    natural = found["natural, many"]["estimators"]
    with drawing.panels(folder / f"{name}.png", 2, 2, width=5.2, height=3.7) as (a, b, c, d):
        drawing.title(a, f"(a) MSE, {stage} checkpoint, {len(found['natural, many']['spread'])} batches", "", "")
        order = sorted((*DRAWN, "rloo 2", "rloo 4", "bv_blend 1"), key=lambda key: float(np.mean(natural[key]["mse"])))
        heights = [float(np.mean(natural[key]["mse"])) for key in order]
        colors = [drawing.LIGHT[0 if key.startswith("basis") else 6] for key in order]
        a.barh(range(len(order)), heights, color=colors)
        a.set_yticks(range(len(order)), order, fontsize=8)
        for row, height in enumerate(heights):
            a.text(height, row, f" {height:.3f}", va="center", fontsize=7.5)
        middles = [(low + high) / 2 for low, high in itertools.pairwise(EDGES)]
        drawing.title(b, "(b) MSE by the spread of V in the batch", "standard deviation of V", "MSE")
        drawing.title(c, "(c) MSE by the prompt's value", "V", "MSE")
        drawing.title(d, "(d) baseline exactly 0 or 1", "V", "share")
        for index, key in enumerate(DRAWN):
            look = drawing.style(index)
            b.plot(middles, found["by spread"]["mse"][key], label=key, **look)
            c.plot(labels, natural[key]["mse_by_band"], label=key, **look)
            d.plot(labels, natural[key]["at_bounds_by_band"], label=key, **look)
        drawing.log_scale(b)
        drawing.log_scale(c)
        b.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    from basis_rl.functional.tilt import beta_grid

    with drawing.panels(folder / f"{name}_beta.png", 1, 3, width=4.2) as axes:
        for axis, stage in zip(axes, STAGES, strict=True):
            curves = results["beta"][stage]
            title = f"{stage}: mean V {results['stages'][stage]['mean V']:.2f}"
            drawing.title(axis, title, "β", "MSE" if stage == "early" else "")
            for index, key in enumerate(("initial", "refined")):
                axis.plot(beta_grid(), curves[key], label=key, color=drawing.LIGHT[index], linewidth=1.8)
            low, chosen, high = np.quantile(curves["chosen"], [0.1, 0.5, 0.9])
            axis.axvspan(low, high, color="#999999", alpha=0.2, linewidth=0, label="chosen, 10 to 90 %")
            axis.axvline(chosen, color="#444444", linestyle="--", linewidth=1.2, label="chosen, median")
            axis.set_xscale("log")
            axis.set_ylim(bottom=0)
        axes[0].legend(fontsize=8, frameon=False)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test of seconds, whose numbers mean nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--gentle", action="store_true", help="a tenth of the learning rate: a policy near its reference"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/value_study"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the plots and the raw numbers")
    options = parser.parse_args(argv)
    one_thread()
    plan = QUICK if options.quick else Plan(seed=options.seed)
    name = "value_study"
    if options.gentle:
        plan, name = replace(plan, **GENTLE), "value_study_gentle"
    rollouts = kept_rollouts(plan, options.output / "gentle" if options.gentle else options.output)
    began = time.process_time()
    results = analyse(plan, rollouts, *((2, 10) if options.quick else (REPEATS, MANY)))
    seconds = {**rollouts["seconds"], "analysis": round(time.process_time() - began, 1)}
    show(results)
    plot(results, options.results, name)
    learnt = [float(rewards.mean()) for _, rewards in rollouts["history"]]
    raw = {"plan": asdict(plan), "processor seconds": seconds, "reward of each batch": learnt, **shortened(results)}
    save(name, rounded(raw), options.results)


if __name__ == "__main__":
    main()
