"""From a recipe to the run: rewards, tools, baseline, model parts, data, server, trainer."""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar
from trl import ModelConfig, get_peft_config, get_quantization_config

from basis_rl import resources
from basis_rl.baselines import Baseline, NoBaseline, build_baseline
from basis_rl.clusters import PromptClusters
from basis_rl.data import load_prompts
from basis_rl.data.prompts import load_tasks
from basis_rl.data.rows import bare_problem
from basis_rl.engine.server import ServerOptions
from basis_rl.environments import build_environment
from basis_rl.evaluation.benchmarks import load_benchmark
from basis_rl.names import Mistakes, did_you_mean
from basis_rl.objectives import build_objective
from basis_rl.recipe.keys import Recipe, RunArguments
from basis_rl.recipe.words import parse_value
from basis_rl.registry import construct, find
from basis_rl.rewards.base import read_columns
from basis_rl.rewards.registry import build_reward, split_params
from basis_rl.run.artefacts import MissingArtefact
from basis_rl.samplers import build_sampler
from basis_rl.tools import TOOLS, chat_template
from basis_rl.trainer import BasisConfig, BasisTrainer
from basis_rl.trainer.model_check import check_saved
from basis_rl.trainer.plan import Plan, check_with_model, plan_run, with_data
from basis_rl.values import ValueTable


def build_rewards(recipe: Recipe) -> list[Any]:
    """The reward functions, in the recipe's order.

    Raises:
        ValueError: a name that is neither registered nor can be imported, parameters or weights that do not fit.
    """
    names = recipe.run.reward_funcs
    weights = recipe.args.reward_weights
    if weights is not None and len(weights) != len(names):
        funcs = f"the {len(names)} reward_funcs {', '.join(names)}"
        raise ValueError(f"reward_weights has {len(weights)} entries for {funcs}: give one for each, in their order.")
    params = split_params(names, recipe.run.reward_kwargs or {})
    known = {"max_completion_length": recipe.args.max_completion_length, "answer_in": "auto"}
    return [build_reward(name, params[name], known) for name in names]


def build_tools(run: RunArguments) -> list[Any]:
    """The tools.

    Raises:
        ValueError: a name that is neither registered nor can be imported, or parameters that do not fit.
    """
    names = run.tools or []
    kwargs = dict(run.tool_kwargs or {})
    for name in kwargs:
        if name not in names:
            raise ValueError(f"tool_kwargs: '{name}' is not among the tools {names}.{did_you_mean(name, names)}")
    return [construct("tool", find("tool", TOOLS, name), name, kwargs.get(name) or {}, "tool_kwargs") for name in names]


def build_recipe_baseline(run: RunArguments) -> Baseline:
    """The recipe's baseline object, from a registered name or a user's class as ``module:Class``.

    Raises:
        ValueError: no such baseline, or parameters that do not fit it.
    """
    return build_baseline(run.baseline, **(run.baseline_kwargs or {}))


def build_run_environment(run: RunArguments) -> Any:
    """What makes the environment, or those of a mapping by their names; None without one.

    Raises:
        ValueError: it cannot be imported, or parameters that do not fit.
    """
    named = run.environment
    if named is None:
        if run.environment_kwargs:
            raise ValueError("environment_kwargs needs environment: module:Class.")
        return None
    # A mapping on the command line.
    named = parse_value("--environment", named) if isinstance(named, str) and named.startswith("{") else named
    return build_environment(named, run.environment_kwargs or {})


def load_config_and_tokenizer(
    model: ModelConfig, args: BasisConfig, template: str | None = None
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model's configuration and its tokenizer, without its weights.

    Args:
        model, args: of the recipe.
        template: see `RunArguments.chat_template`.

    Raises:
        ValueError: they cannot be loaded.
    """
    return load_by_name(str(model.model_name_or_path), model.model_revision, args.trust_remote_code, template)


def load_by_name(
    name: str, revision: str | None, trust_remote_code: bool, template: str | None = None
) -> tuple[Any, PreTrainedTokenizerBase]:
    """As `load_config_and_tokenizer`, for a model without a recipe."""
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    # With a local model nothing is downloaded, and progress bars would only break up the log.
    if Path(name).is_dir():
        disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(name, **options)
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", truncation_side="left", **options)
    except (OSError, ValueError) as error:
        where = "" if Path(name).is_dir() else " (there is no such folder; taken for a Hub id)"
        makes = [each for each in resources.EXAMPLES if name.startswith(f"runs/{each}/") and where]
        way_out = "".join(f" `basis-rl quickstart {each}` makes it." for each in makes)
        why = f"{where}: {str(error)[:300]}{way_out}"
        raise ValueError(f"model_name_or_path: '{name}' could not be loaded{why}") from error
    check_saved(name, tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if template is not None:
        tokenizer.chat_template = chat_template(template, tokenizer)
    return config, tokenizer


def load_training_data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, plan: Plan | None = None, *, held_out: bool = False
) -> Dataset:
    """The recipe's problems, as messages if the tokenizer has a chat template. Which columns count is decided by the
    rewards and environment of the `plan`; without one they are built."""
    data = recipe.data
    column = recipe.args.difficulty_column
    if held_out and data.dataset_test_split:
        data = replace(data, max_train_samples=recipe.run.max_eval_samples)
    # The log reads this column, which keep_columns need not name.
    if column is not None and data.keep_columns is not None and column not in data.keep_columns:
        data = replace(data, keep_columns=[*data.keep_columns, column])
    chat = tokenizer.chat_template is not None
    if plan is None:
        made = build_run_environment(recipe.run)
        plan = Plan(recipe.args, reward_funcs=build_rewards(recipe), kwargs={"environment_factory": made})
    if plan.environments:
        return load_tasks(data, conversational=chat, held_out=held_out, reads=plan.reads)
    reads = read_columns(plan.reward_funcs)
    # Where there is a gold it counts, so that a script that loads the same problems gets the same ids.
    counting = reads | {"solution"}
    return load_prompts(data, conversational=chat, held_out=held_out, reads=counting, gold="solution" in reads)


def load_eval_data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, plan: Plan | None = None
) -> Dataset | dict[str, Dataset] | None:
    """What training is measured on: the recipe's benchmarks and, as ``held_out``, the problems that it holds out; the
    latter alone if there are no benchmarks.

    Raises:
        ValueError: an evaluation is asked for without ``eval_strategy``, or there is nothing to measure on.
    """
    run = recipe.run
    if recipe.args.eval_strategy == "no":
        asked = {"eval_benchmarks": run.eval_benchmarks, "eval_on_start": recipe.args.eval_on_start}
        for key in (key for key, value in asked.items() if value):
            raise ValueError(f"{key} needs eval_strategy: steps (and eval_steps), or epoch.")
        return None
    if not run.eval_benchmarks:
        return load_training_data(recipe, tokenizer, plan, held_out=True)
    chat = tokenizer.chat_template is not None
    sets: dict[str, Dataset] = {}
    for item in run.eval_benchmarks:
        problems = load_benchmark(item, recipe.data, conversational=chat, limit=run.max_eval_samples)
        if problems.name in (*sets, "held_out"):
            raise ValueError(f"eval_benchmarks: '{problems.name}' is the name of two sets. Give another: NAME=SOURCE.")
        sets[problems.name] = problems.dataset.select_columns(["prompt", "solution", "prompt_id"])
    if recipe.data.test_fraction > 0 or recipe.data.dataset_test_split:
        sets["held_out"] = load_training_data(recipe, tokenizer, plan, held_out=True)
    return sets


def _warn_of_overlap(dataset: Dataset, evaluated: Dataset | dict[str, Dataset] | None) -> None:
    """Warn of benchmark problems that are trained on. Only their texts are compared, without golds and instructions."""
    trained = set(map(bare_problem, dataset["prompt"])) if "prompt" in dataset.column_names else set()
    for name, problems in (evaluated if isinstance(evaluated, dict) else {}).items():
        common = len(trained & set(map(bare_problem, problems["prompt"])))
        if common:
            logging.getLogger(__name__).warning("%d problems of '%s' are among the training problems.", common, name)


def model_init_kwargs(recipe: Recipe) -> dict[str, Any]:
    """The arguments of `from_pretrained` for the model."""
    model = recipe.model
    given = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    extra = recipe.args.model_init_kwargs
    return {**given, **(json.loads(extra) if isinstance(extra, str) else extra or {})}


def server_options(recipe: Recipe, port: int, log: Path) -> ServerOptions:
    """The vLLM server of a recipe that starts one itself, in the precision that the training generates in."""
    run = recipe.run
    args = recipe.args
    return ServerOptions(
        model=str(recipe.model.model_name_or_path),
        port=port,
        dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else recipe.model.dtype or "float32",
        max_model_len=args.vllm_max_model_length,
        log=log,
        devices=run.serve_devices,
        # Last, so that they win.
        extra=["--seed", str(args.seed), *shlex.split(run.serve_args or "")],
        # main is TRL's default, and what None means to vLLM.
        revision=None if recipe.model.model_revision == "main" else recipe.model.model_revision,
        max_lora_rank=recipe.model.lora_r if args.vllm_lora_sync == "adapter" else None,
    )


def plan_recipe(recipe: Recipe, baseline: Baseline | None = None) -> Plan:
    """The objects of a recipe, with all checks that need neither data nor tokenizer.

    Args:
        recipe: of the run.
        baseline: in place of the recipe's own.

    Raises:
        ValueError: see `plan_run`, and names or parameters that are wrong.
    """
    run = recipe.run
    found = build_objective(run.objective) if run.objective is not None else None
    for key in ("loss_type", "importance_sampling_level"):
        # Also where it is TRL's default, which `plan_run` cannot tell from one that is not given.
        if found is not None and key in recipe.resolved and getattr(found, key, None) != recipe.resolved[key]:
            means = f"means {key} {getattr(found, key, 'of its own')}"
            raise ValueError(f"objective '{run.objective}' {means}, but {key} is '{recipe.resolved[key]}'. Drop one.")
    recipe.args.model_init_kwargs = model_init_kwargs(recipe)
    return plan_run(
        recipe.model.model_name_or_path,
        build_rewards(recipe),
        recipe.args,
        baseline=baseline or build_recipe_baseline(run),
        objective=found,
        prompt_sampler=build_sampler(run.prompt_sampler, **(run.prompt_sampler_kwargs or {})),
        tools=build_tools(run),
        environment_factory=build_run_environment(run),
        peft_config=get_peft_config(recipe.model),
        quantization_config=get_quantization_config(recipe.model),
    )


def baseline_or_stand_in(run: RunArguments) -> tuple[str | None, Baseline]:
    """Build the recipe's baseline. If its value table or codebook does not exist yet, a stand-in takes its place.

    Returns:
        The key of the missing artefact (``values`` or ``clusters``), or None; and the baseline.

    Raises:
        ValueError: as `build_recipe_baseline`, except for a missing artefact.
    """
    stand_ins = {"values": ValueTable.from_rewards({"": [0.0, 1.0]}), "clusters": PromptClusters({"": 0})}
    try:
        return None, build_recipe_baseline(run)
    except MissingArtefact:
        given = run.baseline_kwargs or {}
        key = next((key for key in stand_ins if isinstance(given.get(key), str)), None)
        if key is None:
            raise
        return key, build_recipe_baseline(replace(run, baseline_kwargs={**given, key: stand_ins[key]}))


@dataclass(frozen=True)
class Checked:
    """A recipe after all checks that need no weights.

    Attributes:
        plan: with its data.
        problems: how many were loaded; the plan may have dropped some.
        config: the model's.
        missing: the key of an artefact that is not there yet (`baseline_or_stand_in`); the plan then has no baseline.
    """

    plan: Plan
    problems: int
    config: Any
    missing: str | None


def check_recipe(recipe: Recipe, *, artefact: bool = True) -> Checked:
    """Build and check every part of a recipe, and report all mistakes together.

    Args:
        recipe: of the run.
        artefact: whether a value table or codebook that the baseline names must be there.

    Raises:
        ValueError: everything that is wrong with settings, model and data.
    """
    wrong = Mistakes()
    missing, baseline = wrong.tried(baseline_or_stand_in, recipe.run) or (None, NoBaseline())
    if missing is not None and artefact:
        wrong.tried(build_recipe_baseline, recipe.run)
    plan = wrong.tried(plan_recipe, recipe, baseline)
    if plan is None:
        made = wrong.tried(build_run_environment, recipe.run)
        rewards = wrong.tried(build_rewards, recipe) or []
        plan = Plan(recipe.args, reward_funcs=rewards, kwargs={"environment_factory": made})
    model = wrong.tried(load_config_and_tokenizer, recipe.model, plan.args, recipe.run.chat_template)
    config, tokenizer = model or (None, None)
    if recipe.run.environment and not plan.environments:
        # Nothing is known about its rows.
        wrong.tell()
    texts: Any = tokenizer or SimpleNamespace(chat_template=None)
    loaded = wrong.tried(load_training_data, recipe, texts, plan)
    evaluated = wrong.tried(load_eval_data, recipe, texts, plan)
    whole = wrong.tried(with_data, plan, loaded, evaluated, processing_class=tokenizer) if loaded is not None else None
    # If the data has mistakes, look for others with the data as it is.
    whole = whole or replace(plan, train_dataset=loaded, kwargs={**plan.kwargs, "processing_class": tokenizer})
    # The stand-in's empty table would refuse prompts that the missing one will have.
    if missing is not None:
        whole = replace(whole, baseline=NoBaseline())
    if loaded is not None and config is not None:
        wrong.tried(check_with_model, whole, config)
    wrong.tell()
    assert loaded is not None
    return Checked(whole, len(loaded), config, missing)


def build_trainer(recipe: Recipe) -> BasisTrainer:
    """Everything that a run needs, checked before the model's weights are loaded.

    Raises:
        ValueError: see `check_recipe`.
    """
    plan = check_recipe(recipe).plan
    _warn_of_overlap(plan.train_dataset, plan.eval_dataset)
    return BasisTrainer(str(recipe.model.model_name_or_path), plan=plan)
