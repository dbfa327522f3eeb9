"""``basis-rl check RECIPE``."""

from __future__ import annotations

import inspect
import io
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from basis_rl.baselines import (
    Baseline,
)
from basis_rl.cli import check_run, check_site
from basis_rl.cli.main import notes, report
from basis_rl.cli.options import check_parser
from basis_rl.conformance import (
    BaselineError,
    ObjectiveError,
    SamplerError,
    check_baseline,
    check_objective,
    check_sampler,
)
from basis_rl.estimate.footprint import Launch, planned, read_launch
from basis_rl.names import article, import_object
from basis_rl.objectives import (
    Objective,
    TrlObjective,
)
from basis_rl.recipe.build import load_config_and_tokenizer, load_eval_data, load_training_data
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.keys import Recipe
from basis_rl.recipe.objects import build_recipe_baseline, build_rewards, build_tools
from basis_rl.recipe.words import parse_yaml
from basis_rl.rewards import RewardError, check_reward
from basis_rl.samplers import (
    PromptSampler,
    build_sampler,
)
from basis_rl.trainer.config import with_objective
from basis_rl.trainer.preflight import (
    baseline_of_settings,
    check_baseline_fits,
    check_context,
    check_dataset,
    check_eval_data,
    check_golds,
    check_pair,
    check_sampler_fits,
    check_start,
    run_context,
)
from basis_rl.trainer.tool_check import as_functions, check_tools

_IN_ORDER = "The recipe is in order."


@dataclass
class Findings:
    """The sections as they come, and what was noticed on the way."""

    warnings: list[str] = field(default_factory=list)

    def warn(self, message: str) -> None:
        """Keep a warning for the end, where it is read."""
        self.warnings.append(message)

    def show(self, title: str, text: str) -> None:
        """Print a section at once: what comes after it may take a while."""
        print(f"== {title}\n{text}\n", flush=True)

    def show_warnings(self) -> None:
        """Print the warnings, numbered."""
        if self.warnings:
            numbered = (f"{number}. {warning}" for number, warning in enumerate(self.warnings, 1))
            self.show(f"{len(self.warnings)} warning(s)", "\n".join(numbered))


def main(argv: Sequence[str]) -> int:
    """Run all checks that training makes before its first step, without loading weights, and print what would happen.

    ``basis-rl check module:name`` runs the conformance checks on a user's own baseline, objective or reward instead;
    ``--argument value`` are then the arguments of its constructor.
    """
    options, rest = check_parser().parse_known_args(list(argv))
    found = Findings()
    try:
        if rest and ":" in rest[0] and not Path(rest[0]).exists():
            print(conform(rest[0], constructor_arguments(rest[1:])))
            return 0
        launch = read_launch(options.accelerate_config, options.world_size)
        with planned(launch):
            recipe = parse_recipe(rest)
            notes(recipe.notes)
            check(recipe, launch, options.gpu_memory, shlex.join(rest), found)
    except (ValueError, OSError, BaselineError, ObjectiveError, RewardError, SamplerError) as error:
        found.show_warnings()
        return report(error)
    found.show_warnings()
    print(f"The recipe is in order, with {len(found.warnings)} warning(s)." if found.warnings else _IN_ORDER)
    return 2 if found.warnings and options.strict else 0


def check_quietly(recipe: Recipe) -> None:
    """The same without a word, on this machine; what a baseline needs must be there.

    Raises:
        ValueError: what training would refuse.
    """
    build_recipe_baseline(recipe.run)
    with redirect_stdout(io.StringIO()):
        check(recipe, read_launch(None, None), None, "", Findings())


def constructor_arguments(rest: Sequence[str]) -> dict[str, Any]:
    """``--name value`` or ``--name=value``, also as ``--baseline_kwargs.name``; values are read as in a recipe.

    Raises:
        ValueError: something else, or a value that is not YAML.
    """
    words = [part for word in rest for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        raise ValueError(f"Give the arguments of a constructor as `--name value`, not {shlex.join(rest)!r}.")
    keys = [word.removeprefix("--").removeprefix("baseline_kwargs.") for word in words[::2]]
    return {key: _value(flag, text) for key, flag, text in zip(keys, words[::2], words[1::2], strict=True)}


def _value(flag: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise ValueError(
            f"{flag} {text}: the value is not valid YAML: {problem}. A text is given as '\"{text}\"'."
        ) from error


def conform(name: str, arguments: Mapping[str, Any] | None = None) -> str:
    """Check what stands at ``module:name``: an objective, a reward or its class, a prompt sampler's class, a baseline,
    its class or what builds one.

    Args:
        name: where it stands.
        arguments: of its constructor.

    Raises:
        ValueError: an objective without declarations, or arguments for what takes none.
        BaselineError, ObjectiveError, RewardError, SamplerError: promises of the contract that it breaks.
    """
    found = import_object(name, "baseline, prompt sampler, objective or reward")
    check = _check_of(found)
    if arguments:
        if isinstance(found, Baseline) or (not isinstance(found, type) and check is not check_baseline):
            raise ValueError(f"{name} is no class, so it takes no arguments: {', '.join(arguments)}.")
        found = _with_arguments(found, arguments)
    return f"{name} keeps the contract: {', '.join(check(found))}."


def _with_arguments(make: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """A function of the same name that calls `make` with `arguments`."""

    def build() -> Any:
        return make(**arguments)

    build.__name__ = getattr(make, "__name__", type(make).__name__)
    return build


def _check_of(found: Any) -> Callable[[Any], list[str]]:
    """The conformance checks of its kind."""
    if isinstance(found, Baseline):
        return check_baseline
    if not callable(found):
        kind = type(found).__name__
        raise ValueError(
            f"{article(kind).capitalize()} {kind} is neither a baseline, its class or a prompt sampler's, nor an "
            "objective or a reward function: there is nothing to check."
        )
    if isinstance(found, type) and issubclass(found, PromptSampler):
        return check_sampler
    if _takes_completions(found):
        return check_reward
    if isinstance(found, (Objective, TrlObjective)) or (inspect.isfunction(found) and _reads_one(found)):
        return check_objective
    return check_baseline


def _takes_completions(found: Any) -> bool:
    call: Any = found if inspect.isroutine(found) else getattr(found, "__call__", None)  # noqa: B004
    try:
        return "completions" in inspect.signature(call).parameters
    except (TypeError, ValueError):
        return False


def _reads_one(function: Callable[..., Any]) -> bool:
    """Whether a function has one parameter without a default: an objective's form, though not yet declared."""
    return sum(each.default is each.empty for each in inspect.signature(function).parameters.values()) == 1


def check(recipe: Recipe, launch: Launch, gpu_memory: float | None, arguments: str, found: Findings) -> None:
    """Check the recipe and describe the run, section by section.

    Args:
        recipe: what is to be run.
        launch: the processes it would be run on.
        gpu_memory: of one GPU, in GiB; None is the visible one's, if there is one.
        arguments: the command line, for the commands that are suggested.
        found: takes it all in.

    Raises:
        ValueError: what training would refuse.
    """
    artefact, baseline = check_site.build_baseline(recipe.run)
    rewards = build_rewards(recipe)
    tools = build_tools(recipe.run)
    args, objective = with_objective(recipe.args, recipe.run.objective)
    baseline = baseline_of_settings(baseline, args)
    check_start(args)
    check_baseline_fits(baseline, args)
    objective = check_pair(baseline, objective, args)
    sampler = build_sampler(recipe.run.prompt_sampler, **(recipe.run.prompt_sampler_kwargs or {}))
    config, tokenizer = load_config_and_tokenizer(recipe.model, args)
    found.show("Configuration", check_run.configuration(recipe, args, launch, found.warn))

    loaded = load_training_data(recipe, tokenizer)
    functions = as_functions(tools)
    check_tools(functions, tokenizer, loaded, args, launch.world)
    if tools:
        found.show("Tools", check_run.tools(tools, args))
    found.show("Batch arithmetic", check_run.arithmetic(args, len(loaded), found.warn))
    check_dataset(loaded, args, rewards)
    check_sampler_fits(sampler, loaded, args, {})
    found.show("Columns", check_run.columns(loaded, args, rewards))
    texts = check_run.render_prompts(loaded, args, tokenizer, functions)
    lengths = check_run.prompt_lengths(texts, tokenizer)
    found.show("Prompts", check_run.prompts(texts, lengths, tokenizer))
    check_context(config, max(lengths), args)
    scored = check_golds(loaded, args, rewards)
    found.show("Golds", check_run.golds(loaded, scored, rewards, found.warn))
    check_dataset(scored, args, rewards)
    check_eval_data(load_eval_data(recipe, tokenizer), args, rewards)
    found.show("Enough for a step?", check_run.first_step(args, len(scored)))

    context = run_context(config, tokenizer, scored, rewards, args, functions)
    if artefact is not None or check_site.validates(baseline):
        text = check_site.artefact(recipe, baseline, artefact, context, arguments, found.warn)
        found.show("What the baseline needs", text)
    if not sampler.in_dataset_order:
        found.show("Sampling", check_run.sampling(sampler, baseline if artefact is None else None, scored, args))
    learned = check_site.learned_parameters(baseline, config, launch)
    plan = check_site.Plan(recipe, args, config, launch, max(lengths), gpu_memory, learned)
    found.show("Memory of a GPU", check_site.memory(plan, found.warn))
    found.show("Disk", check_site.disk(plan, found.warn))
    found.show("Rollouts", check_site.server(plan, found.warn))
    check_site.extras(plan, found.warn)
    found.show("Sandbox of the rewards", check_site.sandbox())
    found.show("Hub", check_site.hub(args, found.warn))
