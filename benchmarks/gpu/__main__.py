"""Which properties can only be seen on a GPU? Checks and measures all of them, within nine minutes.

    python -m benchmarks.gpu [--cpu] [--stages tests training ...] [--output DIR]
    make gpu GPU_ARGS="--output DIR"

The stages run in order of importance, each in its own process with a time limit. They work offline, with models built
from configurations (0.2 and 0.6B parameters, a vocabulary of 151,936):

- ``tests``: unit tests with a CUDA path: energies and the fused head against float64, gathering, critic, sampler.
- ``training``: steps in bfloat16 with several baselines, LoRA, continuous batching; losses and gradients against TRL's.
- ``time``: where the time of a step goes for 1,024 to 4,096 tokens; generation.
- ``memory``: the peak compared with the estimate of `basis-rl check`, within 10 %; on a CPU the runs only.
- ``resume``: a resumed run compared with the uninterrupted one, to the bit, under deterministic algorithms.
- ``sharding``: ZeRO-2, ZeRO-3 and FSDP2 on one rank, compared with a run without sharding.
- ``ranks``: two ranks, with gloo on one GPU and NCCL on two, compared with one rank.
- ``vllm``: vLLM's engine in the trainer's process: sync error, sleep mode; needs vLLM.
- ``server``: vLLM's server beside the trainer, with weights through a folder and over NCCL; needs vLLM.
- ``rewards``: graders while CUDA is in use.
- ``selection``: prompt samplers in training, and the choice among 100,000 prompts.
- ``overhead``: what each baseline adds to a step with `none`, for 1,024 and 4,096 tokens.

The limits of the stages add up to more than the nine minutes, in which the last ones may not fit. Run the same command
again: stages that have passed are not run again, nor are the parts that have passed of a stage that has not. This holds
after an interruption and after a fix as well. A stage that could not run a part, because something is missing on the
machine, is ``incomplete`` and has not passed. `--fresh` begins anew.

`--cpu` runs everything on tiny models, to check that it works; its times mean nothing. There must be torch,
transformers and accelerate with what they require, pandas, and pyarrow. If other packages are missing and there is no
network, `--wheels DIR` installs those that `make gpu-wheels` has collected.

Results: ``benchmarks/results/gpu/DEVICE_DATE.json``; with `--cpu` ``runs/gpu/cpu_DATE.json``. A file of the day before
is continued. In a copy without its git repository, the variable BASIS_COMMIT gives the commit that is recorded.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu import needs
from benchmarks.gpu.runner import ROOT, Stage, device_name, line, results_file, run_stages

STAGES = (
    Stage("tests", "benchmarks.gpu.unit_tests", 110),
    Stage("training", "benchmarks.gpu.training", 100),
    Stage("time", "benchmarks.gpu.step_time", 120),
    Stage("memory", "benchmarks.gpu.memory", 60),
    Stage("resume", "benchmarks.gpu.resume", 90),
    Stage("sharding", "benchmarks.gpu.sharding", 120),
    Stage("ranks", "benchmarks.gpu.ranks", 60, all_gpus=True),
    Stage("vllm", "benchmarks.gpu.vllm_engine", 120),
    Stage("server", "benchmarks.gpu.vllm_server", 150, all_gpus=True),
    Stage("rewards", "benchmarks.gpu.rewards", 60),
    Stage("selection", "benchmarks.gpu.selection", 60),
    Stage("overhead", "benchmarks.gpu.overhead", 120),
)
BUDGET = 540.0  # seconds for all of them
STRETCH = 6.0  # factor on limits and budget on a CPU, where CI's machines are slow and shared


def install(folder: Path) -> None:
    """Install all wheels of a folder, without the network."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise SystemExit(f"There are no wheels in {folder}. Collect them with `make gpu-wheels`.")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--break-system-packages"]
    subprocess.run([*command, *wheels], check=True)
    importlib.invalidate_caches()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the stages, print a table, and return what is known of each; exits with code 1 if a stage has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--cpu", action="store_true", help="run tiny models on this CPU, to check that it works")
    parser.add_argument(
        "--stages", nargs="+", choices=names, default=names, metavar="STAGE", help="run only these stages (all)"
    )
    parser.add_argument("--output", type=Path, help="folder for the results")
    parser.add_argument("--budget", type=float, help=f"seconds for all stages together ({BUDGET:g})")
    parser.add_argument("--fresh", action="store_true", help="begin today's results anew")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, without a network")
    options = parser.parse_args(argv)
    if options.wheels:
        install(options.wheels)
    if told := needs.complaint():
        raise SystemExit(told)
    device, stretch = ("cpu", STRETCH) if options.cpu else ("cuda", 1.0)
    name = device_name(device)
    if not name:
        raise SystemExit("There is no GPU here. Run with `--cpu` to check that the stages work.")
    folder = options.output or ROOT / ("runs/gpu" if options.cpu else "benchmarks/results/gpu")
    path = results_file(folder, name, options.fresh)
    stages = [stage for stage in STAGES if stage.name in options.stages]
    budget = options.budget or BUDGET * stretch
    for note in needs.notes():
        print(note)
    limits = stretch * sum(stage.limit for stage in stages)
    if limits > budget:
        print(
            f"The limits of {len(stages)} stages add up to {limits:g} s, and they have {budget:g} s. What does not fit "
            "runs when this command is run again."
        )
    done = run_stages(stages, device, path, budget=budget, stretch=stretch, name=name)
    print(f"\n{name}; results: {path}")
    for stage in stages:
        print(line(stage.name, done[stage.name]))
    if left := [stage.name for stage in stages if done[stage.name]["status"] != "passed"]:
        print(f"Not passed: {', '.join(left)}. The same command runs them again, without the parts that have passed.")
    if any(done[stage.name]["status"] == "failed" for stage in stages):
        raise SystemExit(1)
    return done


if __name__ == "__main__":
    main()
