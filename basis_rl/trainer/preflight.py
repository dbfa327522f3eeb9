"""What is checked before a model is loaded: each failure is one message that names the thing and the way out."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from basis_rl.baselines import BASELINES, Baseline, DrGrpo, Gdpo, Grpo, LearnedBaseline
from basis_rl.data import problem_text
from basis_rl.engine import Sampling
from basis_rl.objectives import OBJECTIVES, AnyObjective, for_token_advantages, objective_name
from basis_rl.rewards.base import GoldChecker, required_columns
from basis_rl.run.ranks import on_main_process
from basis_rl.samplers import SAMPLERS, PromptSampler
from basis_rl.samplers.registry import sampler_name
from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.gather import row_prompt_id
from basis_rl.types import RunContext
from basis_rl.values.provenance import fingerprint, rendered_prompt, run_provenance

_logger = logging.getLogger(__name__)
_MOST_DIFFICULTIES = 20
_LONGEST = 256  # prompts that are tokenized to find the longest: to tokenize all of them may take a minute
_COLLECTED = frozenset({"energies", "greedy_rewards", "log_probs", "prompt_texts", "reward_parts", "rollout_weights"})


def check_start(args: BasisConfig) -> None:
    """What would end a run at its start, or make it sample one and the same rollout again and again.

    Raises:
        ValueError: a reporter that is not installed, a folder that cannot be written, a temperature of 0.
    """
    there = get_available_reporting_integrations()
    reporters = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    missing = [name for name in reporters if name in INTEGRATION_TO_CALLBACK and name not in there]
    if missing:
        raise ValueError(
            f"report_to: {', '.join(missing)} is not installed or not set up here. Install it (`pip install "
            f"{' '.join(missing)}`), or set report_to to none{''.join(f', {name}' for name in there)}."
        )
    if args.temperature <= 0:
        raise ValueError(
            f"temperature is {args.temperature:g}: all rollouts of a prompt would be the same, and the loss divides by "
            "it. Take 1.0, or another one above 0."
        )
    place = Path(str(args.output_dir)).absolute()
    while not place.exists() and not place.is_symlink():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "cannot be written" if place.is_dir() else "is not a folder"
        raise ValueError(f"output_dir: '{args.output_dir}' cannot be made: '{place}' {why}. Take another one.")


def check_context(config: Any, prompt: int, args: BasisConfig) -> None:
    """The longest prompt, of so many tokens, and a completion fit into the model's context.

    Raises:
        ValueError: they do not.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = prompt + args.max_completion_length
    if context is not None and length > context:
        raise ValueError(
            f"The longest prompt ({prompt} tokens) and max_completion_length ({args.max_completion_length}) are "
            f"{length} tokens, but the model's context is {context}. Lower max_completion_length, leave the long "
            "prompts out, or extend the context (rope_scaling)."
        )


def longest_prompt(dataset: Dataset, tokenizer: Any, template: Mapping[str, Any]) -> int:
    """Tokens of the longest prompt as the model is given it, among those with the most characters."""
    texts = [rendered_prompt(prompt, tokenizer, template) for prompt in dataset["prompt"]]
    longest = sorted(texts, key=len)[-_LONGEST:]
    encoded = tokenizer(longest, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
    return max(map(len, encoded))


def check_baseline_fits(baseline: Baseline, args: BasisConfig) -> None:
    """The trainer can supply what the baseline reads, and its groups are large enough.

    Raises:
        ValueError: it cannot, or they are not.
    """
    name = _name_of(baseline)
    collected = _COLLECTED | ({"values"} if isinstance(baseline, LearnedBaseline) else set())
    missing = sorted(baseline.requires - collected)
    if missing:
        raise ValueError(f"Baseline '{name}' requires {missing}, which this version of BasisTrainer does not collect.")
    if "rollout_weights" in baseline.requires and not (args.use_vllm and args.vllm_importance_sampling_correction):
        raise ValueError(
            f"Baseline '{name}' requires the weights of the rollout correction (max_rollout_weight), which are there "
            "with use_vllm and vllm_importance_sampling_correction only. Leave max_rollout_weight out."
        )
    if args.beta != 0 and args.kl_placement == "reward" and not baseline.reads_kl:
        reading = ", ".join(key for key, cls in BASELINES.items() if cls.reads_kl)
        raise ValueError(
            f"Baseline '{name}' does not take a KL penalty in the reward. Set kl_placement to 'loss', or take one of "
            f"{reading}."
        )
    if args.num_generations < baseline.min_group_size:
        others = {key: cls for key, cls in BASELINES.items() if cls is not type(baseline)}
        smaller = ", ".join(key for key, cls in others.items() if cls.min_group_size <= args.num_generations)
        raise ValueError(
            f"Baseline '{name}' needs at least {baseline.min_group_size} rollouts per prompt, but num_generations is "
            f"{args.num_generations}. Set num_generations to {baseline.min_group_size} or more, or take a baseline "
            f"that works with {args.num_generations}: {smaller}."
        )


def baseline_of_settings(baseline: Baseline, args: BasisConfig) -> Baseline:
    """The baseline that TRL's own settings ask for, in place of plain ``grpo``; else `baseline` itself.

    ``multi_objective_aggregation="normalize_then_sum"`` is ``gdpo``, ``scale_rewards="none"`` (or False) is
    ``dr_grpo``, and ``scale_rewards="batch"`` is ``grpo`` with ``over="batch"``. Beside another baseline that does not
    scale (``rloo``), ``"none"`` says what is so already.

    Raises:
        ValueError: they ask for another baseline than the one that was chosen.
    """
    wanted, setting = _asked_for(args)
    if wanted is None or (type(wanted) is type(baseline) and wanted.parameters == baseline.parameters):
        return baseline
    if not wanted.scales and not baseline.scales:
        return baseline
    shown = _described(wanted)
    if type(baseline) is not Grpo or baseline.parameters != Grpo().parameters:
        raise ValueError(
            f"{setting} is baseline {shown}, but the run has {_described(baseline)}, which scales advantages in its "
            "own way. Leave one of them out."
        )
    _logger.warning("%s: the baseline is %s.", setting, shown)
    return wanted


def _described(baseline: Baseline) -> str:
    """Its name, and the parameters that are not their defaults."""
    defaults = {name: each.default for name, each in inspect.signature(type(baseline)).parameters.items()}
    changed = [f"{name} {value}" for name, value in baseline.parameters.items() if value != defaults[name]]
    return f"'{_name_of(baseline)}'" + (f" ({', '.join(changed)})" if changed else "")


def _asked_for(args: BasisConfig) -> tuple[Baseline | None, str]:
    """The baseline that TRL's settings mean, None if they are the defaults; and which setting does."""
    aggregation, scale = args.multi_objective_aggregation, args.scale_rewards
    if aggregation == "normalize_then_sum":
        return Gdpo(), f"multi_objective_aggregation='{aggregation}'"
    if aggregation != "sum_then_normalize":
        raise ValueError(
            f"multi_objective_aggregation must be 'sum_then_normalize' or 'normalize_then_sum', got '{aggregation}'."
        )
    if scale not in ("group", "none", "batch"):
        raise ValueError(f"scale_rewards must be 'group', 'batch' or 'none', got '{scale}'.")
    wanted = {"group": None, "none": DrGrpo(), "batch": Grpo(over="batch")}[scale]
    return wanted, f"scale_rewards='{scale}'"


def check_pair(baseline: Baseline, objective: AnyObjective, args: BasisConfig) -> AnyObjective:
    """The objective in the form that keeps apart what the baseline tells apart: ``gspo`` becomes ``gspo_token``.

    Raises:
        ValueError: the baseline gives an advantage to each token, and the objective averages them away.
    """
    by_kl = baseline.token_level == "with_kl"
    if baseline.token_level == "never" or (by_kl and not (args.beta != 0 and args.kl_placement == "reward")):
        return objective
    found = for_token_advantages(objective)
    if found != objective:
        was, now = objective_name(objective), objective_name(found)
        _logger.warning(
            "objective '%s' is '%s' here, since baseline '%s' gives an advantage to each token.",
            was, now, _name_of(baseline),
        )  # fmt: skip
    because = ", with KL in the reward," if by_kl else ""
    check_token_advantages(f"Baseline '{_name_of(baseline)}'{because}", found, way_out=by_kl)
    return found


def check_token_advantages(whose: str, objective: AnyObjective, *, way_out: bool = False) -> None:
    """Raise ValueError if `objective` averages away the advantages of tokens; with `way_out`, KL can leave the reward.

    Args:
        whose: the baseline that gives them, as the message calls it.
    """
    if objective.token_advantages:
        return
    taking = ", ".join(key for key, each in OBJECTIVES.items() if each.token_advantages)
    raise ValueError(
        f"{whose} gives an advantage to each token, and objective '{objective_name(objective)}' would average them "
        f"away: it treats a rollout as a whole. Take one of {taking}, or a baseline with one advantage a rollout"
        f"{', or kl_placement loss' if way_out else ''}."
    )


def check_sampler_fits(sampler: PromptSampler, dataset: Any, args: BasisConfig, given: dict[str, Any]) -> None:
    """The trainer can do what the prompt sampler needs.

    Raises:
        ValueError: it cannot: a dataset that cannot be indexed or has no prompts, a correction without known chances,
            refills where a group has one rollout, is divided between ranks, or is asked for ahead.
    """
    if not isinstance(sampler, PromptSampler):
        raise ValueError(
            f"prompt_sampler must be a name ({', '.join(SAMPLERS)}), 'module:Class' or an object, got "
            f"{sampler.__name__ if isinstance(sampler, type) else type(sampler).__name__}."
        )
    name = sampler_name(sampler)
    if sampler.in_dataset_order:
        return
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"prompt_sampler '{name}' needs a dataset that can be indexed, not a {type(dataset).__name__}. Load it "
            "without streaming, or take prompt_sampler 'uniform'."
        )
    if "prompt" not in dataset.column_names:
        raise ValueError(
            f"prompt_sampler '{name}' chooses among prompts, but the dataset has no column 'prompt', only "
            f"{dataset.column_names}. Add one that tells its rows apart, or take prompt_sampler 'uniform'."
        )
    if sampler.correct and not sampler.known_chances:
        raise ValueError(f"prompt_sampler '{name}' does not know the chances of its draws, so leave `correct` out.")
    if sampler.correct and sampler.max_refills:
        raise ValueError(
            f"prompt_sampler '{name}' cannot `correct` batches that it refills: the chances of a prompt that replaces "
            "another are not known. Leave `correct` out, or set max_refills to 0."
        )
    if sampler.max_refills:
        _check_refills(name, dataset, args, given)


def _check_refills(name: str, dataset: Dataset, args: BasisConfig, given: dict[str, Any]) -> None:
    if args.num_generations < 2:
        raise ValueError(
            f"prompt_sampler '{name}' redraws groups whose rewards are all equal, which a group of one always is. Set "
            "num_generations to 2 or more, or take another sampler: variance, frontier."
        )
    mine = args.generation_batch_size // PartialState().num_processes
    if mine % args.num_generations:
        raise ValueError(
            f"prompt_sampler '{name}' needs whole groups on each process, but {mine} rollouts per process are not a "
            f"multiple of num_generations ({args.num_generations})."
        )
    other = [key for key in ("environment_factory", "rollout_func") if given.get(key)]
    other += ["async_prefetch"] if args.async_prefetch else []
    other += ["images"] if {"image", "images"} & set(dataset.column_names) else []
    if other:
        raise ValueError(f"prompt_sampler '{name}' does not work with {', '.join(other)}: leave one of them out.")


def check_greedy(baseline: Baseline, given: Mapping[str, Any]) -> None:
    """A greedy rollout, where the baseline reads one, is begun as the sampled ones are.

    Raises:
        ValueError: the sampled ones begin with what an environment says, or come from the user's own function.
    """
    own = [key for key in ("environment_factory", "rollout_func") if given.get(key)]
    if own and "greedy_rewards" in baseline.requires:
        raise ValueError(
            f"Baseline '{_name_of(baseline)}' compares with a greedy rollout, which is not generated by "
            f"{', '.join(own)}. Leave it out, or take another baseline: rloo, basis_history."
        )


def _name_of(baseline: Baseline) -> str:
    return next((key for key, cls in BASELINES.items() if cls is type(baseline)), type(baseline).__name__)


def check_dataset(
    dataset: Dataset, args: BasisConfig, reward_funcs: Sequence[Any], *, environments: bool = False
) -> None:
    """Columns are there, and there is at least one generation batch.

    Args:
        dataset: of the training.
        args: settings.
        reward_funcs: whose columns are looked for.
        environments: whether `environment_factory` makes the prompts: the column ``prompt`` may then be missing.

    Raises:
        ValueError: a column is missing, or training would take zero steps.
    """
    columns = dataset.column_names
    if "prompt" not in columns and not environments:
        raise ValueError(
            f"The training dataset has no column 'prompt', only {columns}. Rename yours, or load it with "
            "basis_rl.data.load_prompts."
        )
    _check_reward_columns(dataset, reward_funcs, "dataset")
    if args.difficulty_column is not None:
        _check_difficulty(dataset, args.difficulty_column)
    prompts = args.generation_batch_size // args.num_generations
    if len(dataset) < prompts:
        raise ValueError(
            f"The training dataset has {len(dataset)} prompts, but one generation batch takes {prompts} different ones "
            f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}): training "
            "would end after zero steps. Lower per_device_train_batch_size, gradient_accumulation_steps or "
            "steps_per_generation, or add prompts."
        )


def _check_reward_columns(dataset: Dataset, reward_funcs: Sequence[Any], what: str) -> None:
    for func in reward_funcs:
        missing = sorted(required_columns(func) - set(dataset.column_names))
        if missing:
            name = getattr(func, "__name__", type(func).__name__)
            raise ValueError(
                f"The reward function '{name}' reads the columns {missing}; the {what} has {dataset.column_names}."
            )


def check_eval_data(data: Any, args: BasisConfig, reward_funcs: Sequence[Any]) -> Any:
    """The evaluation set, or the mapping of several, without the problems whose gold cannot be right (`check_golds`).

    Raises:
        ValueError: a column that a reward function reads is missing, or golds do not verify.
    """
    if isinstance(data, dict):
        return {name: check_eval_data(each, args, reward_funcs) for name, each in data.items()}
    if not isinstance(data, Dataset):
        return data
    _check_reward_columns(data, reward_funcs, "evaluation set")
    return check_golds(data, args, reward_funcs)


def _check_difficulty(dataset: Dataset, column: str) -> None:
    if column not in dataset.column_names:
        raise ValueError(f"difficulty_column: the training dataset has no '{column}', only {dataset.column_names}.")
    values = len(set(map(str, dataset[column])))
    if values > _MOST_DIFFICULTIES:
        raise ValueError(
            f"difficulty_column: '{column}' has {values} different values, and each would be a metric. Sort them into "
            f"at most {_MOST_DIFFICULTIES}."
        )


def check_single_turns(dataset: Any, given: dict[str, Any]) -> None:
    """The next batch's request can be known ahead.

    Raises:
        ValueError: it cannot, since the dataset is a stream, or a rollout has several turns.
    """
    turns = [name for name in ("tools", "environment_factory", "rollout_func") if given.get(name)]
    if turns or not isinstance(dataset, Dataset):
        what = f"{', '.join(turns)}" if turns else "a streamed dataset"
        raise ValueError(f"async_prefetch does not work with {what}: leave it out.")
    if {"image", "images"} & set(dataset.column_names):
        raise ValueError("async_prefetch does not work with images: leave it out.")


def check_golds(dataset: Dataset, args: BasisConfig, reward_funcs: Sequence[Any]) -> Dataset:
    """The dataset without the problems whose gold does not verify against itself.

    Reward functions that can tell are `GoldChecker`s. One rank asks, all are told.

    Raises:
        ValueError: there are such problems, and ``on_invalid_gold`` is 'error'.
    """
    checkers = [func for func in reward_funcs if isinstance(func, GoldChecker)]
    if not checkers or "solution" not in dataset.column_names:
        return dataset
    rows = on_main_process(lambda: _invalid_golds(list(dataset["solution"]), checkers))
    if not rows:
        return dataset
    if args.on_invalid_gold == "error":
        shown = "\n  ".join(f"row {i}: {dataset[i]['solution'][:100]!r}" for i in rows[:5])
        raise ValueError(
            f"{len(rows)} of {len(dataset)} golds do not verify against themselves, so no answer to them could be "
            f"right:\n  {shown}\nFix or remove them, or set on_invalid_gold: drop."
        )
    dropped = set(rows)
    return dataset.select([i for i in range(len(dataset)) if i not in dropped])


def _invalid_golds(solutions: list[str], checkers: Sequence[GoldChecker]) -> list[int]:
    return sorted({index for checker in checkers for index in checker.check_golds(solutions)})


def run_context(
    config: Any,
    tokenizer: Any,
    dataset: Dataset | None,
    reward_funcs: Sequence[Any],
    args: BasisConfig,
    tools: Sequence[Any] = (),
) -> RunContext:
    """What `Baseline.validate` may look at. A streamed dataset's prompts are not known beforehand, and left out."""
    prompts: dict[str, str] = {}
    texts: dict[str, str] = {}
    if isinstance(dataset, Dataset):
        template = with_tools(args, tools)
        for row in dataset:
            prompt = row.get("prompt", "")
            prompts[row_prompt_id(row)] = fingerprint(rendered_prompt(prompt, tokenizer, template))
            texts[row_prompt_id(row)] = problem_text(prompt)
    provenance = run_provenance(
        config,
        tokenizer,
        reward_funcs,
        sampling_of(args),
        args.reward_weights,
    )
    return RunContext(prompts=prompts, provenance=provenance, texts=texts)


def with_tools(args: BasisConfig, tools: Sequence[Any]) -> dict[str, Any]:
    """What a chat template is given besides the conversation."""
    return {**(args.chat_template_kwargs or {}), **({"tools": list(tools)} if tools else {})}


def sampling_of(args: BasisConfig) -> Sampling:
    """How the training draws its rollouts, for a value table that must draw them in the same way."""
    extra = args.generation_kwargs
    return Sampling(
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        generation_kwargs=json.loads(extra) if isinstance(extra, str) else extra or {},
    )
