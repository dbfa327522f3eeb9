"""``basis-rl check RECIPE``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from basis_rl.cli import check_model
from basis_rl.cli import check_sections as sections
from basis_rl.cli.main import notes, report
from basis_rl.cli.options import check_parser
from basis_rl.conformance import BaselineError, ObjectiveError, SamplerError
from basis_rl.conformance.named import conform
from basis_rl.estimate.footprint import asked, planned, read_launch
from basis_rl.estimate.memory import Launch
from basis_rl.estimate.report import Footprint, Warn, arithmetic, disk, memory, optimizer_steps
from basis_rl.recipe.build import check_recipe
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.keys import Recipe
from basis_rl.recipe.words import parse_value
from basis_rl.rewards import RewardError
from basis_rl.run.errors import RewardFailed
from basis_rl.sandbox import isolation
from basis_rl.trainer.plan import Plan, run_context, validates
from basis_rl.values import ValueTable


def show(title: str, text: str) -> None:
    """Print a section at once: what comes after it may take a while."""
    print(f"== {title}\n{text}\n", flush=True)


def main(argv: Sequence[str]) -> int:
    """Run all checks that training makes before its first step, and print what would happen. Weights are loaded only
    for ``--draw``.

    ``basis-rl check module:name`` runs the conformance checks on a user's own baseline, objective or reward instead;
    ``--argument value`` are then the arguments of its constructor.
    """
    options, rest = check_parser().parse_known_args(list(argv))
    warnings: list[str] = []
    try:
        if rest and ":" in rest[0] and not Path(rest[0]).exists():
            print(conform(rest[0], constructor_arguments(rest[1:])))
            return 0
        launch = read_launch(options.accelerate_config, options.world_size)
        with planned(launch):
            recipe = parse_recipe(rest)
            notes(recipe.notes)
            plan = check(recipe, launch, options.gpu_memory, shlex.join(rest), warnings.append)
            if options.draw > 0:
                text = check_model.rollouts(recipe, plan, options.draw, warnings.append)
                show("Rollouts of the model as it is", text)
    except (BaselineError, ObjectiveError, RewardError, RewardFailed, SamplerError) as error:
        return report(error)
    finally:
        # At the end, where they are read.
        if warnings:
            show(f"{len(warnings)} warning(s)", "\n".join(f"{n}. {text}" for n, text in enumerate(warnings, 1)))
    print(f"The recipe is in order{f', with {len(warnings)} warning(s)' * bool(warnings)}.")
    return 2 if warnings and options.strict else 0


def constructor_arguments(rest: Sequence[str]) -> dict[str, Any]:
    """``--name value`` or ``--name=value``, also as ``--baseline_kwargs.name``; values are read as in a recipe.

    Raises:
        ValueError: something else, or a value that is not YAML.
    """
    words = [part for word in rest for part in (word.split("=", 1) if word.startswith("--") else [word])]
    pairs = list(zip(words[::2], words[1::2], strict=False))
    if len(words) % 2 or not all(flag.startswith("--") for flag, _ in pairs):
        raise ValueError(f"Give the arguments of a constructor as `--name value`, not {shlex.join(rest)!r}.")
    return {flag.removeprefix("--").removeprefix("baseline_kwargs."): parse_value(flag, text) for flag, text in pairs}


def check(recipe: Recipe, launch: Launch, gpu_memory: float | None, arguments: str, warn: Warn) -> Plan:
    """Check the recipe and describe the run, section by section; the texts are those of `check_sections` and of
    `basis_rl.estimate.report`. Returns the plan of the run.

    Args:
        recipe: what is to be run.
        launch: the processes it would be run on.
        gpu_memory: of one GPU, in GiB; None is the visible one's, if there is one.
        arguments: the command line, for the commands that are suggested.
        warn: is called with each warning.

    Raises:
        ValueError: what training would refuse.
    """
    checked = check_recipe(recipe, artefact=False)
    plan = checked.plan
    args = plan.args
    launch = asked(launch, args)
    baseline = plan.baseline
    problems = len(plan.train_dataset)
    show("Configuration", sections.configuration(recipe, args, launch, warn))
    if plan.tools:
        show("Tools", sections.tools(plan.tools, args))
    for each in plan.episodes:
        show(f"Environment: {each.name}", sections.environment(plan, each))
    show("Batch arithmetic", arithmetic(args, problems, warn))
    show("Columns", sections.columns(plan, warn))
    lengths = plan.prompt_lengths()
    if not plan.episodes:
        show("Prompts", sections.prompts(plan, lengths))
    if answers := sections.answers(plan, warn):
        show("Answers", answers)
    show("Golds", sections.golds(checked.problems - problems, plan, warn))
    if checked.missing is not None:
        needs = sections.missing_artefact(recipe, checked.missing, problems, arguments, warn)
        show("What the baseline needs", needs)
    elif validates(baseline):
        show("What the baseline needs", sections.artefact(baseline, run_context(plan, checked.config), warn))
        if isinstance(table := getattr(baseline, "values", None), ValueTable):
            show("Groups without variance", check_model.of_table(plan, table))
    if plan.draws_prompts:
        show("Sampling", sections.sampling(plan))
    footprint = Footprint(recipe.model, args, checked.config, launch, max(lengths), gpu_memory, baseline)
    show("Memory of a GPU", memory(footprint, warn))
    show("Disk", disk(footprint, optimizer_steps(args, problems), warn))
    show("Rollouts", sections.server(recipe, footprint, warn))
    if args.streams:
        show("Streaming", sections.streaming(recipe, footprint))
    sections.extras(args, launch, warn)
    show("Sandbox of the rewards", f"On this machine: {isolation()}.")
    show("Hub", sections.hub(args, warn))
    return plan
