"""Which properties can only be seen on a GPU? Checks and measures all of them, within nine minutes.

    python -m benchmarks.gpu [--cpu] [--stages tests training ...] [--output DIR]

The stages run in order of importance, each in its own process with a time limit. They work offline, with models built
from configurations (0.2 and 0.6B parameters, a vocabulary of 151,936):

- ``tests``: unit tests with a CUDA path: energies and the fused head against float64, gathering, critic, sampler.
- ``training``: steps in bfloat16 with several baselines, LoRA, continuous batching; losses and gradients against TRL's.
- ``time``: where the time of a step goes for 1,024 to 4,096 tokens, and what each baseline adds to `none`.
- ``memory``: the peak compared with the estimate of `basis-rl check`, within 10 %; needs a GPU.
- ``resume``: a resumed run compared with the uninterrupted one, to the bit, under deterministic algorithms.
- ``sharding``: ZeRO-2, ZeRO-3 and FSDP2 on one rank, compared with a run without sharding.
- ``ranks``: two ranks on one GPU, with gloo, compared with one rank.
- ``vllm``: vLLM's engine in the trainer's process: sync error, sleep mode; needs vLLM.
- ``rewards``: graders while CUDA is in use.
- ``selection``: prompt samplers in training, and the choice among 100,000 prompts.

A stage that has passed is not run again: after an interruption or a fix, the same command runs the remaining stages.
`--cpu` runs everything on tiny models, to check that it works; its times mean nothing. If packages are missing and
there is no network, `--wheels DIR` installs those that `make gpu-wheels` has collected.

Results: ``benchmarks/results/gpu/DEVICE_DATE.json``; with `--cpu` ``runs/gpu/cpu_DATE.json``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import ROOT, Stage, device_name, line, results_file, run_stages

STAGES = (
    Stage("tests", "benchmarks.gpu.unit_tests", 110),
    Stage("training", "benchmarks.gpu.training", 100),
    Stage("time", "benchmarks.gpu.step_time", 120),
    Stage("memory", "benchmarks.gpu.memory", 60, "torch counts on a GPU only; benchmarks.memory_estimate is for a CPU"),
    Stage("resume", "benchmarks.gpu.resume", 90),
    Stage("sharding", "benchmarks.gpu.sharding", 120),
    Stage("ranks", "benchmarks.gpu.ranks", 60),
    Stage("vllm", "benchmarks.gpu.vllm_engine", 120),
    Stage("rewards", "benchmarks.gpu.rewards", 60),
    Stage("selection", "benchmarks.gpu.selection", 60),
)
BUDGET = 540.0  # seconds for all of them
STRETCH = 3.0  # factor on limits and budget on a CPU, where CI's machines are slow


def install(folder: Path) -> None:
    """Install all wheels of a folder, without the network."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise SystemExit(f"There are no wheels in {folder}. Collect them with `make gpu-wheels`.")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--break-system-packages"]
    subprocess.run([*command, *wheels], check=True)


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
    parser.add_argument("--fresh", action="store_true", help="run stages again that have passed")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, without a network")
    options = parser.parse_args(argv)
    if options.wheels:
        install(options.wheels)
    device, stretch = ("cpu", STRETCH) if options.cpu else ("cuda", 1.0)
    name = device_name(device)
    if not name:
        raise SystemExit("There is no GPU here. Run with `--cpu` to check that the stages work.")
    folder = options.output or ROOT / ("runs/gpu" if options.cpu else "benchmarks/results/gpu")
    path = results_file(folder, name)
    if options.fresh:
        path.unlink(missing_ok=True)
    stages = [stage for stage in STAGES if stage.name in options.stages]
    budget = options.budget or BUDGET * stretch
    done = run_stages(stages, device, path, budget=budget, stretch=stretch, name=name)
    print(f"\n{name}; results: {path}")
    for stage in stages:
        print(line(stage.name, done[stage.name]))
    if any(done[stage.name]["status"] == "failed" for stage in stages):
        raise SystemExit(1)
    return done


if __name__ == "__main__":
    main()
