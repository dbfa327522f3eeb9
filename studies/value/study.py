"""How close are baselines to the true values of a real policy?

    python -m studies.value.study [--worked | --slow | --selection] [--seeds 0 1 2] [--report] [--quick]

In the paper of BASIS (Sec. 5.1 and App. A), the error of BASIS is 69 % below that of the batch mean, and
below that of the mean of a group of 8. This study checks it at small scale. The quickstart's model learns sums by GRPO
with 8 rollouts per prompt. At three checkpoints of this run (early, middle, late), every prompt of a pool gets 256
rollouts for its true value, and 64 more for the estimators. The value table has 32 rollouts per prompt of the policy
before the run. Batches have 64 prompts. Estimators with a history (`bv_blend`, `basis_history`) have learnt from what
the run itself sampled before the checkpoint; those with one rollout per prompt have seen the first of each eight.

With ``--worked`` the policy writes steps of its own choice before it answers (`studies.worked_sums`). Pool and run are
then smaller, because its rollouts take twice as long; the learning rate is a third, and the checkpoints are earlier.
``--slow`` uses this learning rate and these checkpoints with the quickstart's policy. ``--selection`` has the policy of
`studies.selection.task`, whose prompts are nearly solved, hard or impossible; `bv_blend` has kinds for families.

Results: the tables ``studies/results/value_study*.json``, each with a plot, but only for all seeds. Rollouts are stored
in ``--output`` (``runs/value_study``), with the policies of the checkpoints; a second call only repeats the analysis.
``--report`` prints and plots the table that is stored.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from basis_rl.baselines import (
    Baseline,
    Basis,
    BasisHistory,
    BatchMean,
    BVBlend,
    DrGrpo,
    Ebpo,
    Grpo,
    JamesStein,
    Rloo,
    Spo,
)
from basis_rl.rewards import MathVerifyReward
from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable
from benchmarks.common import machine, one_thread
from examples.quickstart.warm_start import save as save_policy
from studies.runs import RESULTS, placed, read_table, save_table, study_parser
from studies.selection import task
from studies.small_policy import TOKENS, draw, problems, trainer_for, warm_policy
from studies.value import analysis as va
from studies.value import report
from studies.worked_sums import TOKENS as WORKED_TOKENS
from studies.worked_sums import worked_policy

GROUP, BATCHES = 8, 200
STAGES = report.STAGES


@dataclass(frozen=True)
class Plan:
    """The settings of the policy and its rollouts; stored rollouts are used only for the same plan."""

    seed: int = 0
    problems: int = 20000  # of the warm start
    trained: int = 2048  # problems that RL trains on
    pool: int = 512  # those of them whose values are estimated
    until: float = 0.45
    prompts: int = 64  # per generation batch, with 8 rollouts each
    checkpoints: tuple[int, ...] = (20, 60, 120)  # generation batches
    learning_rate: float = 3e-4
    table: int = 32
    oracle: int = 256
    samples: int = 64
    policy: str = "quickstart"  # "worked": of `worked_sums`; "selection": of `studies.selection.task`
    warm_start: int = 1500  # supervised steps of the selection study's policy


QUICK = Plan(
    problems=300, trained=32, pool=24, until=0.0, prompts=4, checkpoints=(1, 2, 3), table=4, oracle=8, samples=8,
    warm_start=3,
)  # fmt: skip


# What `--worked` changes: the policy adds in steps, and its rollouts take twice as long.
WORKED: dict[str, Any] = {
    "policy": "worked", "until": 0.4, "trained": 1024, "pool": 256, "learning_rate": 1e-4, "checkpoints": (8, 20, 40),
}  # fmt: skip
SLOW = {key: WORKED[key] for key in ("learning_rate", "checkpoints")}  # what `--slow` changes
SELECTION: dict[str, Any] = {
    "policy": "selection", "trained": 1024, "pool": 256, "learning_rate": 6e-4, "checkpoints": (30, 80, 160),
}  # fmt: skip
CHANGES = {"worked": WORKED, "slow": SLOW, "selection": SELECTION}  # what the options change
TEMPERATURE = {1: 0.2, 8: 0.05}  # of BV-Blend's confidence, by rollouts per prompt (`bv_blend_study`)


class Recorder(Grpo):
    """GRPO's baseline, which also records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[list[str], np.ndarray]] = []

    def update(self, batch: RolloutBatch) -> None:
        rewards = batch.rewards.reshape(-1, GROUP).numpy().astype(np.uint8)
        self.batches.append((batch.prompt_ids[::GROUP], rewards))


class AtCheckpoints(TrainerCallback):
    """Calls `look` when the policy has learnt from each number of generation batches in `batches`."""

    def __init__(self, recorder: Recorder, batches: tuple[int, ...], look: Any) -> None:
        self.recorder, self.left, self.look = recorder, list(batches), look

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.left and len(self.recorder.batches) >= self.left[0]:
            self.look(self.left.pop(0))


@dataclass(frozen=True)
class Start:
    """A warm-started policy, its prompts in the columns of `small_policy.problems`, and how long a rollout may be."""

    model: Any
    tokenizer: Any
    prompts: Dataset
    tokens: int


def started_policy(plan: Plan, output: Path) -> Start:
    """The policy before the run."""
    if plan.policy == "selection":
        prompts = task.datasets(task.TASKS["mixed"], plan.trained, 0)[0]
        task.warm_model(prompts, "mixed", plan.seed, folder := output / "warm_start", plan.warm_start)
        kinds = [int(prompt.split()[0].removeprefix("k")) for prompt in prompts["prompt"]]
        prompts = prompts.remove_columns("family").add_column("family", kinds)
        start = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        return Start(*start, prompts, task.TOKENS)
    everything = problems(plan.problems)
    make, tokens = (worked_policy, WORKED_TOKENS) if plan.policy == "worked" else (warm_policy, TOKENS)
    model, tokenizer = make(everything, plan.seed, plan.until)
    return Start(model, tokenizer, everything.select(range(plan.trained)), tokens)


def make_rollouts(plan: Plan, output: Path) -> dict[str, Any]:
    """Train, and sample the rollouts that the analysis needs; returns plain arrays and lists."""
    reward = MathVerifyReward(num_workers=1)
    try:
        return rollouts_of(plan, output, task.reward if plan.policy == "selection" else reward)
    finally:
        reward.close()


def rollouts_of(plan: Plan, output: Path, reward: Any) -> dict[str, Any]:
    """`make_rollouts` with this reward."""
    start = started_policy(plan, output)
    model, tokenizer, trained, tokens = start.model, start.tokenizer, start.prompts, start.tokens
    pool = trained.select(range(plan.pool))
    found: dict[str, Any] = {"ids": trained["prompt_id"], "family": trained["family"]}
    found["reference"] = draw(model, tokenizer, trained, plan.table, reward, "value table", tokens)
    recorder = Recorder()

    def look(batches: int) -> None:
        stage = STAGES[plan.checkpoints.index(batches)]
        training = model.training
        found[stage] = draw(
            model, tokenizer, pool, plan.oracle + plan.samples, reward, f"{stage}: batch {batches}", tokens
        )
        model.train(training)
        save_policy(model, tokenizer, output / stage)

    trainer = trainer_for(
        model, tokenizer, trained, recorder, output / "run", reward,
        [AtCheckpoints(recorder, plan.checkpoints, look)],
        num_generations=GROUP, per_device_train_batch_size=plan.prompts * GROUP // 2,
        max_steps=2 * plan.checkpoints[-1], learning_rate=plan.learning_rate, seed=plan.seed,
        max_completion_length=tokens,
    )  # fmt: skip
    trainer.train()
    found["history"] = recorder.batches
    return found


def kept_rollouts(plan: Plan, output: Path) -> dict[str, Any]:
    """The rollouts of an earlier call, or new ones. ``origin`` is their `machine` record, None if they have none.

    Raises:
        SystemExit: the stored rollouts were made with another plan.
    """
    path, key = output / "rollouts.npz", json.dumps(asdict(plan))
    if path.is_file():
        with np.load(path) as kept:
            if str(kept["plan"]) != key:
                raise SystemExit(f"{path} was made with another plan. Give another --output, or remove the file.")
            found: dict[str, Any] = {k: kept[k] for k in ("reference", *STAGES)}
            found |= {k: kept[k].tolist() for k in ("ids", "family")}
            found["origin"] = json.loads(str(kept["machine"])) if "machine" in kept else None
            found["history"] = list(zip(kept["history_ids"].tolist(), kept["history_rewards"], strict=True))
            return found
    origin = machine()
    found = make_rollouts(plan, output)
    output.mkdir(parents=True, exist_ok=True)
    arrays = {k: v for k, v in found.items() if k != "history"}
    found["origin"] = origin
    partial = path.with_name("partial.npz")
    np.savez_compressed(
        partial, plan=key, machine=json.dumps(origin),
        history_ids=np.array([ids for ids, _ in found["history"]]),
        history_rewards=np.stack([rewards for _, rewards in found["history"]]), **arrays,
    )  # fmt: skip
    partial.replace(path)
    return found


def reference_table(rollouts: dict[str, Any]) -> ValueTable:
    """The value table of the policy before the run, with all training prompts."""
    rewards = zip(rollouts["ids"], rollouts["reference"].astype(float).tolist(), strict=True)
    return ValueTable.from_rewards(dict(rewards))


def estimators(table: ValueTable, rollouts: dict[str, Any], batches: int) -> list[va.Estimator]:
    """All estimators of the study, in their state after `batches` batches of the run."""
    history = rollouts["history"][:batches]
    families = dict(zip(rollouts["ids"], rollouts["family"], strict=True))

    def seen(group: int) -> list[tuple[Sequence[str], np.ndarray]]:
        """What `group` rollouts per prompt would have seen."""
        return [(ids, rewards[:, :group]) for ids, rewards in history]

    def blend(group: int, variance: Literal["shrunk", "paper"]) -> va.Estimator:
        blended = BVBlend(families, temperature=TEMPERATURE[group], variance=variance)
        name = f"bv_blend {group}" + (", paper" if variance == "paper" else "")
        return va.Estimator(name, va.replay(blended, seen(group)), group)

    learners: dict[str, Baseline] = {
        "basis_history": BasisHistory(table, belief="gaussian"),
        "basis_history, no table": BasisHistory(belief="gaussian", fixed_range=(0, 1)),
        "basis_history, beta, no table": BasisHistory(fixed_range=(0, 1)),
        "spo": Spo(table, normalize=False),
        "spo, no table": Spo(normalize=False, fixed_range=(0, 1)),
    }
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
        *(va.Estimator(name, va.replay(learner, seen(1)), 1) for name, learner in learners.items()),
        *(va.Estimator(f"james_stein {g}", JamesStein(), g) for g in (4, 8)),
        *(va.Estimator(f"ebpo {g}", va.replay(Ebpo(), seen(g)), g) for g in (4, 8)),
        *(blend(g, variance) for variance in ("shrunk", "paper") for g in (1, 8)),
    ]


def analyse(plan: Plan, rollouts: dict[str, Any], batches: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of the table for one seed, and the facts about its checkpoints."""
    table, ids = reference_table(rollouts), rollouts["ids"][: plan.pool]
    size = min(64, plan.pool // 2)
    rows, checkpoints = [], []
    for stage, learnt_from in zip(STAGES, plan.checkpoints, strict=True):
        truth, samples = rollouts[stage][:, : plan.oracle].mean(axis=1), rollouts[stage][:, plan.oracle :]
        compared = estimators(table, rollouts, learnt_from)
        found = va.measure(compared, ids, truth, samples, size=size, batches=batches, seed=1)
        rows += [{"seed": plan.seed, "stage": stage, "estimator": name, **row} for name, row in found.items()]
        checkpoints.append({
            "seed": plan.seed,
            "stage": stage,
            "mean V": float(truth.mean()),
            "spread of V": float(truth.std()),
            **va.drift(rollouts["reference"][: plan.pool], rollouts[stage][:, : plan.table]),
            "error of the oracle": float((truth * (1 - truth)).mean() / (plan.oracle - 1)),
            "by table": by_table(plan, rollouts, stage, size, batches),
        })  # fmt: skip
    return rows, checkpoints


def by_table(plan: Plan, rollouts: dict[str, Any], stage: str, size: int, batches: int) -> dict[str, float]:
    """MSE of `basis` at a stage with a table of the reference and of each stage up to it; ``none`` is the batch mean.

    The rollouts that do not measure the true value are split in half: one half makes the tables, the other the batches.
    """
    ids, half = rollouts["ids"][: plan.pool], plan.samples // 2
    truth = rollouts[stage][:, : plan.oracle].mean(axis=1)
    samples, rows = rollouts[stage][:, plan.oracle : plan.oracle + half], [va.Estimator("none", BatchMean(), 1)]
    for name in ("reference", *STAGES[: STAGES.index(stage) + 1]):
        rewards = rollouts[name][: plan.pool, -half:].astype(float).tolist()
        table = ValueTable.from_rewards(dict(zip(ids, rewards, strict=True)))
        rows.append(va.Estimator(name, Basis(table), 1))
    measured = va.measure(rows, ids, truth, samples, size=size, batches=batches, seed=2)
    return {name: row["mse"] for name, row in measured.items()}


def main(argv: list[str] | None = None) -> None:
    """Run the study."""
    parser = study_parser(__doc__, "value_study")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    policies = parser.add_mutually_exclusive_group()
    policies.add_argument("--worked", action="store_true", help="use a policy that adds in steps")
    policies.add_argument(
        "--slow", action="store_true", help="use the learning rate and checkpoints of --worked with the default policy"
    )
    policies.add_argument("--selection", action="store_true", help="use the policy of the selection study")
    parser.add_argument("--report", action="store_true", help="print and plot the stored table")
    options = parser.parse_args(argv)
    chosen = [name for name in CHANGES if getattr(options, name)]
    flags = [*chosen, "report"] if options.report else chosen
    placed(options, parser.parse_args([f"--{name}" for name in flags]))
    one_thread()
    name = "_".join(["value_study", *chosen])
    if options.report:
        facts, rows = read_table(RESULTS / f"{name}.json")
        checkpoints = facts["checkpoints"]
    else:
        rows, checkpoints = measured(options, name, CHANGES[chosen[0]] if chosen else {})
    print(report.table(rows, checkpoints))
    report.plot(rows, checkpoints, options.results / f"{name}.png")


def measured(
    options: argparse.Namespace, name: str, changes: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Make the rollouts of each seed unless they are stored, analyse them, and save the table."""
    plan = replace(QUICK, policy=changes.get("policy", QUICK.policy)) if options.quick else replace(Plan(), **changes)
    rows, checkpoints, runs_made = [], [], []
    for seed in options.seeds:
        own = replace(plan, seed=seed)
        rollouts = kept_rollouts(own, options.output / f"{name}-{seed}")
        found = analyse(own, rollouts, 10 if options.quick else BATCHES)
        rows += found[0]
        checkpoints += found[1]
        runs_made += [] if rollouts["origin"] in runs_made else [rollouts["origin"]]
    facts = {"runs made": runs_made, "plan": asdict(plan), "temperature": TEMPERATURE, "checkpoints": checkpoints}
    save_table(name, facts, rows, options.results)
    return rows, checkpoints


if __name__ == "__main__":
    main()
