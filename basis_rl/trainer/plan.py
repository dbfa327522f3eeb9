"""Completes the inputs of a run, and checks them in one order.

`BasisTrainer`, ``train``, ``check``, ``values`` and ``sweep`` all come through here, so Python and the shell refuse the
same mistakes with the same words. There are three stages, because each needs more than the one before: `plan_run`
(settings and objects), `with_data` (the datasets), `check_with_model` (the tokenizer and the model's configuration).
Each failure is one message that names the thing and the way out. No weights are loaded here.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import Dataset
from torch.nn import Linear, Module
from transformers import AutoModelForCausalLM, Trainer, get_scheduler
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from basis_rl.baselines import BASELINES, Baseline, DrGrpo, Gdpo, Grpo, LearnedBaseline, NoBaseline, baseline_name
from basis_rl.conformance.baselines import try_ragged
from basis_rl.conformance.objectives import reads_delta
from basis_rl.data import problem_text
from basis_rl.data.prompts import IMAGES, TAKEN, seed_rows
from basis_rl.engine import Sampling
from basis_rl.engine.template_day import template_day, use_day
from basis_rl.environments import Episode, play, reset_columns
from basis_rl.functional.objectives import BYPASS
from basis_rl.names import Mistakes, check_word, kind_of
from basis_rl.objectives import (
    OBJECTIVES,
    AnyObjective,
    Objective,
    TrlObjective,
    for_token_advantages,
    objective_name,
)
from basis_rl.registry import build
from basis_rl.rewards.base import check_reward_columns, declared_range, read_columns, required_columns
from basis_rl.rewards.call import try_reward
from basis_rl.rewards.golds import invalid_golds, without_invalid_golds
from basis_rl.rewards.registry import build_reward
from basis_rl.rewards.thought import tell_rewards
from basis_rl.run.ranks import asked_processes, on_main_process
from basis_rl.samplers import SAMPLERS, PromptSampler, build_sampler, sampler_name
from basis_rl.trainer.config import BasisConfig, with_objective
from basis_rl.trainer.gather import prompt_ids_of
from basis_rl.trainer.generation_check import check_generation, check_truncated_sampling, generation_kwargs_of
from basis_rl.trainer.micro_batches import check_token_budget
from basis_rl.trainer.packing import method_of
from basis_rl.trainer.prompt_check import check_prompts, check_template, first_rows, render_prompt
from basis_rl.trainer.tool_check import as_functions, check_tools
from basis_rl.types import OF_UPDATE, SIGNALS, RunContext
from basis_rl.values.provenance import fingerprint, run_provenance

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
# Values of difficulty_column: each of them becomes a metric.
_MOST_DIFFICULTIES = 20
# Adam moves a weight by the learning rate whatever its gradient, SGD in proportion to it.
_SMALL_GRADIENT = 1e-3
_LARGEST_STEP = 0.5
# How many prompts are tokenized to find the longest: to tokenize all of them may take a minute.
_LONGEST = 256
# Prompts whose groups are tried on the baseline.
_TRIED = 8
# What a baseline may ask for: not the KL penalty, which the settings decide, nor what comes with another signal.
_COLLECTED = frozenset(SIGNALS) - OF_UPDATE - {"kl", "values", "reward_weights"}


@dataclass(frozen=True)
class Plan:
    """What a run is made of, as whole objects.

    Attributes:
        args: the settings, with the loss that the objective means.
        baseline, objective, sampler, reward_funcs: as objects.
        train_dataset, eval_dataset: None until `with_data`.
        kwargs: everything else that TRL's trainer is given, by name; ``tools`` as functions.
        episodes: one of each environment that a row of the training dataset has, with `with_data`.
    """

    args: BasisConfig
    baseline: Baseline = field(default_factory=NoBaseline)
    objective: AnyObjective = field(default_factory=lambda: TrlObjective("dapo", "token"))
    sampler: PromptSampler = field(default_factory=lambda: build_sampler("uniform"))
    reward_funcs: list[Any] = field(default_factory=list)
    train_dataset: Any = None
    eval_dataset: Any = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    episodes: tuple[Episode, ...] = ()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None if it is not known yet."""
        return self.kwargs.get("processing_class")

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """What the model may call."""
        return list(self.kwargs.get("tools") or [])

    @property
    def environments(self) -> dict[str | None, Callable[[], Any]]:
        """What makes the environments, by their names; a single one has none."""
        made = self.kwargs.get("environment_factory") or {}
        return made if isinstance(made, dict) else {None: made}

    @property
    def draws_prompts(self) -> bool:
        """Whether the prompts of each batch are drawn (`Selection`), and not those of TRL's order."""
        return not self.sampler.in_dataset_order or self.args.max_generations is not None

    @property
    def draws_problems(self) -> bool:
        """Whether an environment, and not the row, decides about the problem: resets with one row say different
        things."""
        return not all(each.repeats for each in self.episodes)

    @functools.cached_property
    def reads(self) -> frozenset[str] | None:
        """The columns that make two rows with one prompt different problems (`row_id`); None for all of them."""
        made = self.environments
        taken = [each.columns for each in self.episodes] or list(map(reset_columns, made.values()))
        if None in taken:
            return None
        chosen = ["environment"] if made and None not in made else []
        return read_columns(self.reward_funcs).union(chosen, *(columns for columns in taken if columns is not None))

    @functools.cached_property
    def prompt_ids(self) -> list[str] | None:
        """The id of each training row (`row_id`); None for a stream."""
        return prompt_ids_of(self.train_dataset, self.reads)

    @functools.cached_property
    def rendered(self) -> list[str]:
        """Every training prompt as the model is given it; empty where an environment makes the prompts."""
        if "prompt" not in self.train_dataset.column_names:
            return [""] * len(self.train_dataset)
        template = with_tools(self.args, self.tools)
        return [render_prompt(self.tokenizer, prompt, template) for prompt in self.train_dataset["prompt"]]

    @functools.cached_property
    def first_rows(self) -> Dataset | None:
        """The training rows; of a stream, as many as are checked. None if there is no dataset."""
        return first_rows(self.train_dataset, max(self.args.prompts_per_batch, _LONGEST))

    @property
    def sets(self) -> dict[str, Dataset]:
        """The datasets whose prompts the model is given, by their names in messages."""
        # These make prompts of their own.
        if _given(self, "environment_factory", "rollout_func"):
            return {}
        found = {"train_dataset": self.first_rows}
        evaluated = self.eval_dataset
        named = evaluated if isinstance(evaluated, dict) else {} if evaluated is None else {"": evaluated}
        for name, rows in named.items():
            found[f"eval_dataset['{name}']" if name else "eval_dataset"] = first_rows(rows, _LONGEST)
        return {name: rows for name, rows in found.items() if rows is not None and "prompt" in rows.column_names}

    def as_text(self, episode: Episode, messages: list[dict[str, Any]]) -> str:
        """Messages of an episode as the model is given them."""
        return render_prompt(self.tokenizer, messages, with_tools(self.args, [*self.tools, *episode.tools]))

    def prompt_lengths(self, most: int | None = None) -> list[int]:
        """Lengths of the prompts in tokens; with `most`, only of that many prompts, those with the most characters.
        With environments only those of the episodes are known."""
        texts = [self.as_text(each, each.prompt) for each in self.episodes]
        if not texts:
            texts = self.rendered if most is None else sorted(self.rendered, key=len)[-most:]
        # A template writes special tokens itself.
        plain = self.tokenizer.chat_template is None
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=plain)["input_ids"]]


Check = Callable[[Plan], Plan | None]


def plan_run(
    model: Any,
    reward_funcs: Any = None,
    args: BasisConfig | None = None,
    baseline: str | Baseline = "grpo",
    objective: str | AnyObjective | None = None,
    prompt_sampler: str | PromptSampler = "uniform",
    **kwargs: Any,
) -> Plan:
    """Make the inputs of a run whole, except for the datasets, and check them. The arguments are `BasisTrainer`'s.

    Raises:
        ValueError: something is wrong, or two things do not fit.
    """
    args, found = with_objective(as_config(args, model), objective)
    if args.vllm_lora_sync == "adapter" and kwargs.get("peft_config") is None and not hasattr(model, "peft_config"):
        raise ValueError("vllm_lora_sync: adapter needs a LoRA policy: use_peft, or peft_config.")
    plan = Plan(
        args=args,
        baseline=as_object("baseline", baseline, BASELINES, Baseline),
        objective=found,
        sampler=as_object("prompt_sampler", prompt_sampler, SAMPLERS, PromptSampler),
        reward_funcs=as_rewards(reward_funcs, args),
        kwargs={**kwargs, "tools": as_functions(kwargs.get("tools")) or None},
    )
    # Before any prompt is rendered: a value table decides which date the chat template writes.
    days = [getattr(each, "template_day", None) for each in plan.baseline.parameters.values()]
    use_day(next(filter(None, days), template_day()))
    return _checked(plan, OF_SETTINGS)


def with_data(plan: Plan, train_dataset: Any, eval_dataset: Any = None, **kwargs: Any) -> Plan:
    """The plan with its datasets, checked, without the problems whose gold cannot be right.

    Args:
        plan: of `plan_run`.
        train_dataset, eval_dataset: as `BasisTrainer` takes them. With an environment, None is `seed_rows`.
        **kwargs: further arguments of TRL's trainer that are known only now (``processing_class``).

    Raises:
        ValueError: something is wrong with the data.
    """
    if train_dataset is None and plan.environments:
        train_dataset = seed_rows()
    plan = replace(
        plan,
        train_dataset=as_dataset(train_dataset, "train_dataset"),
        eval_dataset=as_dataset(eval_dataset, "eval_dataset"),
        kwargs={**plan.kwargs, **kwargs},
    )
    return _checked(plan, DATA)


def check_with_model(plan: Plan, config: Any) -> None:
    """Check what the model's configuration and the tokenizer decide. A streamed dataset's prompts are not known.

    Raises:
        ValueError: the prompts are too long for the model, or the baseline refuses the run.
    """
    wrong = Mistakes()
    for check in WITH_MODEL:
        wrong.tried(check, plan, config)
    wrong.tell()


def _checked(plan: Plan, checks: Sequence[Check]) -> Plan:
    """The plan after all checks, whose mistakes are told together."""
    wrong = Mistakes()
    for check in checks:
        plan = wrong.tried(check, plan) or plan
    wrong.tell()
    return plan


# Settings.


def baseline_of_settings(plan: Plan) -> Plan:
    """The baseline that TRL's own settings ask for, in place of plain ``grpo``; else the plan's.

    ``multi_objective_aggregation="normalize_then_sum"`` is ``gdpo``, ``scale_rewards="none"`` (or False) is
    ``dr_grpo``, and ``scale_rewards="batch"`` is ``grpo`` with ``over="batch"``. Beside another baseline that does not
    scale (``rloo``), ``"none"`` changes nothing.

    Raises:
        ValueError: they ask for another baseline than the one that was chosen.
    """
    args = plan.args
    baseline = plan.baseline
    of_aggregation = {"sum_then_normalize": None, "normalize_then_sum": Gdpo()}
    of_scale = {"group": None, "batch": Grpo(over="batch"), "none": DrGrpo()}
    check_word("multi_objective_aggregation", args.multi_objective_aggregation, of_aggregation)
    check_word("scale_rewards", args.scale_rewards, of_scale)
    wanted: Baseline | None = of_aggregation[args.multi_objective_aggregation] or of_scale[args.scale_rewards]
    if wanted is None or (type(wanted) is type(baseline) and wanted.parameters == baseline.parameters):
        return plan
    if not wanted.scales and not baseline.scales:
        return plan
    setting = f"scale_rewards {args.scale_rewards}, multi_objective_aggregation {args.multi_objective_aggregation}"
    shown = f"'{baseline_name(wanted)}' {wanted.parameters}"
    if type(baseline) is not Grpo or baseline.parameters != Grpo().parameters:
        raise ValueError(
            f"{setting}: that is baseline {shown}, but the run has '{baseline_name(baseline)}' {baseline.parameters}, "
            "which scales advantages in its own way. Leave one of them out."
        )
    _logger.warning("%s: the baseline is %s.", setting, shown)
    return replace(plan, baseline=wanted)


def check_reporters(plan: Plan) -> None:
    """The reporters are installed."""
    report_to = plan.args.report_to
    there = get_available_reporting_integrations()
    reporters = [report_to] if isinstance(report_to, str) else report_to or []
    missing = [name for name in reporters if name in INTEGRATION_TO_CALLBACK and name not in there]
    if missing:
        raise ValueError(
            f"report_to: {', '.join(missing)} is not installed or not set up here. Install it (`pip install "
            f"{' '.join(missing)}`), or set report_to to none{''.join(f', {name}' for name in there)}."
        )


def check_temperature(plan: Plan) -> None:
    """Rollouts of a prompt can differ."""
    if plan.args.temperature <= 0:
        raise ValueError(
            f"temperature is {plan.args.temperature:g}: all rollouts of a prompt would be the same, and the loss "
            "divides by it. Take 1.0, or another value above 0."
        )


def check_values(plan: Plan) -> None:
    """No setting has a value that no run can have."""
    args = plan.args
    if args.remove_unused_columns:
        raise ValueError("remove_unused_columns: true takes away the columns that reward functions read. Leave it out.")
    if not all(map(math.isfinite, args.reward_weights or ())):
        raise ValueError("reward_weights must be finite numbers, or rewards are NaN or infinite. 0 leaves one out.")
    if args.max_steps == 0 or args.max_steps < -1:
        raise ValueError("max_steps must be above 0, or -1, which leaves the length to num_train_epochs.")
    if args.use_liger_kernel and find_spec("liger_kernel") is None:
        raise ValueError("use_liger_kernel needs liger-kernel: `pip install liger-kernel`, or leave it out.")
    if args.max_steps < 0 and args.num_train_epochs <= 0:
        raise ValueError("num_train_epochs must be above 0.")
    if (asked := asked_processes()) > 1:
        raise ValueError(
            f"accelerate launch was asked for {asked} processes and has started one: with --cpu it starts no more. "
            f"Use basis-rl train --accelerate_config cpu --num_processes {asked}, or leave --num_processes out."
        )


def check_optimizer(plan: Plan) -> None:
    """Optimizer and schedule accept their settings, and a step is of a usual size: tried on a model of one number."""
    args = plan.args
    if plan.kwargs.get("optimizers") or plan.kwargs.get("optimizer_cls_and_kwargs"):
        return
    try:
        made, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        raise ValueError(f"optim {getattr(args.optim, 'value', args.optim)}: {error}") from error
    except ValueError:
        # Some optimizers need the model.
        return
    try:
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.full((1,), _SMALL_GRADIENT)
        optimizer = made([weight], **settings)
        extra = args.lr_scheduler_kwargs if isinstance(args.lr_scheduler_kwargs, dict) else None
        get_scheduler(args.lr_scheduler_type, optimizer, 0, 1, scheduler_specific_kwargs=extra)
    except (TypeError, ValueError) as error:
        keys = "learning_rate, adam_beta1, adam_beta2, lr_scheduler_type or lr_scheduler_kwargs"
        raise ValueError(f"{keys}: {error}") from error
    with suppress(Exception):
        # Some optimizers need a GPU.
        optimizer.step()
    if args.learning_rate == 0 or abs(weight.item()) >= _LARGEST_STEP:
        what = "changes nothing" if args.learning_rate == 0 else "moves each weight that far, whatever its gradient"
        raise ValueError(f"learning_rate is {args.learning_rate:g}: a step {what}. Usual are 1e-7 to 1e-3.")


def check_folder(plan: Plan) -> None:
    """The run's folder can be written."""
    output_dir = plan.args.output_dir
    place = Path(str(output_dir)).absolute()
    while not place.exists() and not place.is_symlink():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "cannot be written" if place.is_dir() else "is not a folder"
        raise ValueError(f"output_dir: '{output_dir}' cannot be made: '{place}' {why}. Take another one.")


def check_baseline_needs(plan: Plan) -> None:
    """The trainer can supply what the baseline reads, and its groups are large enough."""
    baseline = plan.baseline
    args = plan.args
    name = baseline_name(plan.baseline)
    collected = _COLLECTED | ({"values"} if isinstance(baseline, LearnedBaseline) else set())
    if unknown := sorted(baseline.learns_from - OF_UPDATE):
        raise ValueError(
            f"Baseline '{name}' learns from {unknown}; what `learns_from` can name is {sorted(OF_UPDATE)}."
        )
    missing = sorted(baseline.requires - collected)
    if missing:
        raise ValueError(
            f"Baseline '{name}' requires {missing}, which BasisTrainer does not collect. It collects "
            f"{sorted(collected)}."
        )
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
    if args.max_generations is not None and args.num_generations == baseline.min_group_size:
        raise ValueError(
            f"max_generations leaves nothing to divide: baseline '{name}' needs {baseline.min_group_size} rollouts of "
            f"each prompt, and num_generations is {args.num_generations}. Set num_generations to "
            f"{args.num_generations + 1} or more, or leave max_generations out."
        )
    if args.num_generations < baseline.min_group_size:
        others = {key: cls for key, cls in BASELINES.items() if cls is not type(baseline)}
        smaller = ", ".join(key for key, cls in others.items() if cls.min_group_size <= args.num_generations)
        raise ValueError(
            f"Baseline '{name}' needs at least {baseline.min_group_size} rollouts per prompt, but num_generations is "
            f"{args.num_generations}. Set num_generations to {baseline.min_group_size} or more, or take a baseline "
            f"that works with {args.num_generations}: {smaller}."
        )


def check_bypass(plan: Plan) -> None:
    """With ``vllm_importance_sampling_mode: bypass`` there is an engine's policy, and nothing asks for the old one."""
    args = plan.args
    objective = plan.objective
    if args.vllm_importance_sampling_mode != BYPASS:
        return
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        raise ValueError(
            "vllm_importance_sampling_mode: bypass takes the log-probabilities of the engine that samples, which only "
            "vLLM tells: it needs use_vllm and vllm_importance_sampling_correction. Set both, or leave the mode out."
        )
    without_ratio = isinstance(objective, Objective) and objective.on_policy
    asking = {
        f"baseline '{baseline_name(plan.baseline)}'": {"log_probs", "rollout_weights"} & plan.baseline.requires,
        "kl_placement: reward": args.beta != 0 and args.kl_placement == "reward",
        f"objective '{objective_name(objective)}', which has no ratio": without_ratio,
    }
    if found := [name for name, asks in asking.items() if asks]:
        raise ValueError(
            "vllm_importance_sampling_mode: bypass leaves out the old policy's log-probabilities and all weights, so "
            f"it does not work with {', '.join(found)}. Leave the mode out, or change that."
        )


def check_bounds(plan: Plan) -> None:
    """Bounds of ratios are set only where something reads them, and do not reject everything."""
    args = plan.args
    if args.vllm_importance_sampling_mode == "seq_mean_k3" and (args.vllm_importance_sampling_clip_min or 0) > 0:
        raise ValueError(
            "vllm_importance_sampling_clip_min above 0 with vllm_importance_sampling_mode: seq_mean_k3 rejects every "
            "rollout of the present policy, whose k3 is 0. Leave the minimum out."
        )
    if args.delta is not None and not reads_delta(plan.objective):
        name = objective_name(plan.objective)
        raise ValueError(f"Objective '{name}' does not read delta, which would change nothing. Leave delta out.")


def check_greedy(plan: Plan) -> None:
    """The trainer can generate a greedy rollout, if the baseline compares with one."""
    own = _given(plan, "environment_factory", "rollout_func")
    if own and "greedy_rewards" in plan.baseline.requires:
        raise ValueError(
            f"Baseline '{baseline_name(plan.baseline)}' compares with a greedy rollout, which is not generated by "
            f"{', '.join(own)}. Leave it out, or take another baseline: rloo, basis_history."
        )


def _given(plan: Plan, *names: str) -> list[str]:
    return [name for name in names if plan.kwargs.get(name)]


def objective_for_tokens(plan: Plan) -> Plan:
    """The objective in a form that keeps one advantage per token if the baseline gives it: ``gspo`` becomes
    ``gspo_token``.

    Raises:
        ValueError: the baseline gives an advantage to each token, and the objective averages them away.
    """
    baseline = plan.baseline
    args = plan.args
    name = baseline_name(plan.baseline)
    by_kl = baseline.token_level == "with_kl"
    if baseline.token_level == "never" or (by_kl and not (args.beta != 0 and args.kl_placement == "reward")):
        return plan
    found = for_token_advantages(plan.objective)
    if found != plan.objective:
        was = objective_name(plan.objective)
        now = objective_name(found)
        _logger.warning(
            "objective '%s' is '%s' here, since baseline '%s' gives an advantage to each token.", was, now, name
        )
    because = ", with KL in the reward," if by_kl else ""
    check_token_advantages(f"Baseline '{name}'{because}", found, way_out=by_kl)
    return replace(plan, objective=found)


def check_token_advantages(whose: str, objective: AnyObjective, *, way_out: bool = False) -> None:
    """Raise ValueError if `objective` averages away the advantages of tokens; with `way_out`, KL can leave the reward.

    Args:
        whose: the baseline that gives them, as the message calls it.
        objective: of the run.
        way_out: whether another placement of the KL penalty would help.
    """
    if objective.token_advantages:
        return
    taking = ", ".join(key for key, each in OBJECTIVES.items() if each.token_advantages)
    raise ValueError(
        f"{whose} gives an advantage to each token, and objective '{objective_name(objective)}' would average them "
        f"away: it treats a rollout as a whole. Take one of {taking}, or a baseline with one advantage per rollout"
        f"{', or kl_placement loss' if way_out else ''}."
    )


def check_sampler_needs(plan: Plan) -> None:
    """The trainer can do what the prompt sampler needs, whatever the dataset is.

    Raises:
        ValueError: it cannot: a correction without known chances, refills of groups that have one rollout, are
            divided between ranks, or are generated ahead, or groups of unequal size where they must be equal.
    """
    sampler = plan.sampler
    args = plan.args
    equal = ["rollouts: stream"] * args.streams
    equal += [f"prompt_sampler '{sampler_name(sampler)}'"] * bool(sampler.max_refills)
    if args.max_generations is not None and equal:
        raise ValueError(f"max_generations does not work with {', '.join(equal)}: leave one of them out.")
    if sampler.in_dataset_order:
        return
    name = sampler_name(sampler)
    if sampler.correct and not sampler.known_chances:
        raise ValueError(f"prompt_sampler '{name}' does not know the chances of its draws, so leave `correct` out.")
    if sampler.correct and sampler.max_refills:
        raise ValueError(
            f"prompt_sampler '{name}' cannot `correct` batches that it refills: the chances of a prompt that replaces "
            "another are not known. Leave `correct` out, or set max_refills to 0."
        )
    if not sampler.max_refills:
        return
    if args.num_generations < 2:
        raise ValueError(
            f"prompt_sampler '{name}' redraws groups whose rewards are all equal, which a group of one always is. Set "
            "num_generations to 2 or more, or take another sampler: variance, frontier."
        )
    mine = args.generation_batch_size // args.world_size
    if mine % args.num_generations:
        raise ValueError(
            f"prompt_sampler '{name}' needs whole groups on each process, but {mine} rollouts per process are not a "
            f"multiple of num_generations ({args.num_generations}). Change per_device_train_batch_size or "
            "num_generations."
        )
    other = _given(plan, "environment_factory", "rollout_func") + ["rollouts: stream"] * args.streams
    if other:
        raise ValueError(f"prompt_sampler '{name}' does not work with {', '.join(other)}: leave one of them out.")


OF_SETTINGS: tuple[Check, ...] = (
    baseline_of_settings,
    check_reporters,
    check_values,
    check_temperature,
    lambda plan: check_generation(plan.args),
    lambda plan: check_truncated_sampling(plan.args),
    check_optimizer,
    check_folder,
    check_baseline_needs,
    check_greedy,
    objective_for_tokens,
    check_bounds,
    check_bypass,
    lambda plan: check_token_budget(plan.args, plan.objective),
    check_sampler_needs,
)


# Data.


def check_sampler_data(plan: Plan) -> None:
    """The prompt sampler can choose among the rows: they can be indexed, have prompts, and no images if it refills."""
    sampler = plan.sampler
    dataset = plan.train_dataset
    if not plan.draws_prompts:
        return
    name = sampler_name(sampler)
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"prompt_sampler '{name}' needs a dataset that can be indexed, not a {type(dataset).__name__}. Load it "
            "without streaming, or take prompt_sampler 'uniform' without max_generations."
        )
    if "prompt" not in dataset.column_names and not plan.environments:
        raise ValueError(
            f"prompt_sampler '{name}' chooses among prompts, but the dataset has no column 'prompt', only "
            f"{dataset.column_names}. Add one that tells its rows apart, or take prompt_sampler 'uniform' without "
            "max_generations."
        )
    if sampler.max_refills and IMAGES & set(dataset.column_names):
        raise ValueError(f"prompt_sampler '{name}' does not work with images: leave one of them out.")


def check_columns(plan: Plan) -> None:
    """The columns that the run reads are there; the prompt's may be missing where an environment makes the prompts."""
    dataset = plan.first_rows
    if dataset is None:
        raise ValueError(
            f"train_dataset must be one Dataset or IterableDataset, got {kind_of(plan.train_dataset)}. Of several "
            "datasets, take one or concatenate them."
        )
    if taken := sorted(TAKEN & set(dataset.column_names)):
        raise ValueError(
            f"The training dataset has the columns {taken}, but TRL hands reward functions something else under these "
            "names. Rename them."
        )
    if "prompt" not in dataset.column_names and not plan.environments:
        raise ValueError(
            f"The training dataset has no column 'prompt', only {dataset.column_names}. Rename yours, or load it with "
            "basis_rl.data.load_prompts."
        )
    check_reward_columns(dataset, plan.reward_funcs, "dataset")
    column = plan.args.difficulty_column
    if column is None:
        return
    if column not in dataset.column_names:
        raise ValueError(
            f"difficulty_column: the training dataset has no '{column}', only {dataset.column_names}. Name one of "
            "them, or leave difficulty_column out."
        )
    values = len(set(map(str, dataset[column])))
    if values > _MOST_DIFFICULTIES:
        raise ValueError(
            f"difficulty_column: '{column}' has {values} different values, and each would be a metric. Sort them into "
            f"at most {_MOST_DIFFICULTIES}."
        )


def _with_columns(plan: Plan) -> list[Any]:
    """The reward functions whose columns the training dataset has; `check_columns` tells of the others."""
    columns = set(plan.first_rows.column_names if plan.first_rows is not None else ())
    return [function for function in plan.reward_funcs if required_columns(function) <= columns]


def drop_invalid_golds(plan: Plan) -> Plan:
    """The training problems without those whose gold does not verify against itself.

    Raises:
        ValueError: there are such problems, and ``on_invalid_gold`` is 'error'.
    """
    assert plan.first_rows is not None
    valid = _valid_golds(plan.first_rows, plan)
    return replace(plan, train_dataset=valid) if isinstance(plan.train_dataset, Dataset) else plan


def _valid_golds(dataset: Dataset, plan: Plan) -> Dataset:
    """The rows whose gold the reward functions that can tell (`GoldChecker`) accept. One rank checks for all."""
    found = on_main_process(lambda: [invalid_golds(each, dataset) for each in plan.reward_funcs])
    # Only the first rows of a stream are known, so nothing can be dropped from it.
    streamed = dataset is plan.first_rows and dataset is not plan.train_dataset
    refused = plan.args.on_invalid_gold == "error" or streamed
    way_out = "filter the stream" if streamed else "set on_invalid_gold: drop"
    return without_invalid_golds(dataset, plan.reward_funcs, found, way_out if refused else None)


def check_size(plan: Plan) -> None:
    """There is at least one generation batch."""
    args = plan.args
    dataset = plan.first_rows
    prompts = args.prompts_per_batch
    if dataset is not None and len(dataset) < prompts:
        raise ValueError(
            f"The training dataset has {len(dataset)} prompts, but one generation batch takes {prompts} different ones "
            f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}): training "
            "would end after zero steps. Lower per_device_train_batch_size, gradient_accumulation_steps or "
            "steps_per_generation, or add prompts."
        )


def name_leftovers(plan: Plan) -> None:
    """Say which prompts are never trained on: those after the last whole batch, where every epoch has one order."""
    args = plan.args
    dataset = plan.train_dataset
    prompts = args.prompts_per_batch
    if args.shuffle_dataset or plan.draws_prompts or not isinstance(dataset, Dataset):
        return
    if left := len(dataset) % prompts:
        _logger.warning(
            "shuffle_dataset: false: the rows %d to %d of the training dataset are never trained on, since each "
            "generation batch takes %d prompts, and an epoch ends with the last whole one.",
            len(dataset) - left, len(dataset) - 1, prompts,
        )  # fmt: skip


def check_eval_data(plan: Plan) -> Plan:
    """Columns and golds of the evaluation set, or of each of a mapping of several."""

    def checked(data: Any) -> Any:
        if isinstance(data, dict):
            return {name: checked(each) for name, each in data.items()}
        if not isinstance(data, Dataset):
            return data
        check_reward_columns(data, _with_columns(plan), "evaluation set")
        return _valid_golds(data, plan)

    return replace(plan, eval_dataset=checked(plan.eval_dataset))


def check_rows(plan: Plan) -> None:
    """Each prompt asks something that the model is to answer, and the reward functions can judge."""
    checking = [reward for reward in plan.reward_funcs if hasattr(reward, "check_prompts")]
    for what, rows in plan.sets.items():
        check_prompts(rows["prompt"], what)
        # A picture may show what the text does not.
        for reward in [] if IMAGES & set(rows.column_names) else checking:
            reward.check_prompts([problem_text(prompt) for prompt in rows["prompt"]])


def check_templates(plan: Plan) -> None:
    """The tokenizer, if one is known, makes of the first prompts what the model was trained to read.

    Reward functions that ask for the rendered prompts are given them.
    """
    if plan.tokenizer is None:
        return
    template = with_tools(plan.args, plan.tools)
    for what, rows in plan.sets.items():
        first = rows.select(range(min(len(rows), _LONGEST)))
        check_template(first, plan.tokenizer, template, what)
        if what == "train_dataset" and len(first):
            rendered = [render_prompt(plan.tokenizer, prompt, template) for prompt in first["prompt"]]
            tell_rewards(plan.reward_funcs, rendered, plan.tokenizer)


def check_rewards(plan: Plan) -> None:
    """Each reward function scores an answer to the first prompt. What environments pass on is not there yet."""
    rows = plan.first_rows
    if rows is None or not len(rows) or _given(plan, "environment_factory", "rollout_func"):
        return

    # A stream grades outside of the main thread, where signals (signal.alarm) do not work.
    attempt = in_thread(try_reward) if plan.args.streams else try_reward

    def tried() -> None:
        wrong = Mistakes()
        for function in _with_columns(plan):
            if callable(function) and not isinstance(function, Module):
                wrong.tried(attempt, function, rows[0])
        wrong.tell()

    on_main_process(tried)


def in_thread(work: Callable[..., _Result]) -> Callable[..., _Result]:
    """`work`, done in a new thread by each call."""

    @functools.wraps(getattr(work, "func", work), updated=())
    def elsewhere(*args: Any, **kwargs: Any) -> _Result:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(work, *args, **kwargs).result()

    return elsewhere


def check_stream(plan: Plan) -> None:
    """With ``rollouts: stream`` prompts are known ahead, and rollouts are drawn and scored one by one."""
    args = plan.args
    if not args.streams:
        return
    other = _given(plan, "rollout_func")
    other += ["reward models (a function may call one on a server)"] * any(
        isinstance(each, Module | str) for each in plan.reward_funcs
    )
    if not isinstance(plan.train_dataset, Dataset):
        other.append("a streamed dataset")
    elif IMAGES & set(plan.train_dataset.column_names):
        other.append("images")
    if other:
        raise ValueError(f"rollouts: stream does not work with {', '.join(other)}: set rollouts to sync.")
    batches = args.batches_in_flight
    assert batches is not None
    prompts = args.prompts_per_batch
    if len(plan.train_dataset) < batches * prompts:
        raise ValueError(
            f"rollouts: stream would have {batches * prompts} prompts in flight (batches_in_flight {batches} x "
            f"{prompts} of a generation batch), but there are {len(plan.train_dataset)}. Lower batches_in_flight or "
            "the generation batch, or add prompts."
        )
    _refuse_short_steps(args, len(plan.train_dataset) // prompts)


def _refuse_short_steps(args: BasisConfig, batches: int) -> None:
    """A shorter step at the end of each epoch would take a stream's rollouts beyond ``max_staleness``, which counts
    whole steps.

    Args:
        args: of the run.
        batches: generation batches of an epoch.
    """
    accumulation = args.gradient_accumulation_steps
    micro_batches = batches * args.steps_per_generation * args.num_iterations
    steps = -(-micro_batches // accumulation)
    goes_on = args.max_steps > steps if args.max_steps > 0 else args.num_train_epochs > 1
    if goes_on and micro_batches % accumulation:
        raise ValueError(
            f"rollouts: stream counts optimizer steps ahead, and an epoch of {micro_batches} micro-batches would end "
            f"with one of fewer than {accumulation} (gradient_accumulation_steps), so that rollouts become older than "
            f"max_staleness. Set gradient_accumulation_steps to {math.gcd(micro_batches, accumulation)}, change the "
            "number of prompts, or set rollouts to sync."
        )


def environment_rows(plan: Plan) -> list[tuple[Callable[[], Any], dict[str, Any]]]:
    """What makes each environment, and the columns of the first row that it is reset with.

    Raises:
        ValueError: there are several, and a row does not name one of them.
    """
    rows = plan.first_rows
    assert rows is not None
    if None in plan.environments or not plan.environments:
        return [(factory, rows[0]) for factory in plan.environments.values()]
    names = list(rows["environment"]) if "environment" in rows.column_names else [None]
    if unknown := [name for name in names if name not in plan.environments]:
        known = ", ".join(map(str, plan.environments))
        raise ValueError(f"environment: each row names one in a column 'environment', of {known}; not {unknown[0]!r}.")
    # As in TRL, the name is not for the environment.
    kept = rows.remove_columns("environment")
    return [(plan.environments[name], kept[names.index(name)]) for name in plan.environments if name in names]


def play_environments(plan: Plan) -> Plan:
    """The plan with one episode of each environment, played by the main process."""
    if not plan.environments or not plan.first_rows:
        return plan
    functions = [each for each in plan.reward_funcs if callable(each) and not isinstance(each, Module)]

    # A stream makes, resets and rewards an environment in different threads.
    where = in_thread if plan.args.streams else lambda work: work

    def played() -> list[Episode]:
        wrong = Mistakes()
        found = [wrong.tried(where(play), where(factory), row, functions) for factory, row in environment_rows(plan)]
        wrong.tell()
        return [each for each in found if each is not None]

    plan = replace(plan, episodes=tuple(on_main_process(played)))
    if not functions and not any(each.owns_reward for each in plan.episodes):
        raise ValueError("environment: nothing gives a reward. Give it a method `get_reward`, or set reward_funcs.")
    return plan


def check_repeats(plan: Plan) -> None:
    """The rollouts of a group, and the prompts that a sampler draws again, are of one problem."""
    if not plan.draws_problems:
        return
    why = (
        "environment: reset with the same row again it says other things. Let `reset` take what decides about the "
        "problem, such as a `seed`, from the row, or"
    )
    if plan.draws_prompts:
        drawing = f"prompt_sampler '{sampler_name(plan.sampler)}' and max_generations"
        raise ValueError(f"{why} leave out {drawing}, which draw rows again.")
    if plan.args.num_generations > 1:
        _logger.warning("%s the rollouts of a group are of different problems.", why)


DATA: tuple[Check, ...] = (
    check_sampler_data,
    check_columns,
    drop_invalid_golds,
    check_size,
    name_leftovers,
    check_eval_data,
    check_stream,
    lambda plan: check_tools([*plan.tools, *plan.environments], plan.tokenizer, plan.train_dataset, plan.args),
    play_environments,
    check_repeats,
    check_rows,
    check_templates,
    check_rewards,
)


# With the model's configuration and the tokenizer.


def longest_prompt(plan: Plan) -> int | None:
    """Tokens of the longest prompt; None where images make it longer."""
    rows = plan.first_rows
    if rows is None or IMAGES & set(rows.column_names):
        return None
    # As it is, the plan has its prompts rendered already.
    whole = plan if rows is plan.train_dataset else replace(plan, train_dataset=rows)
    return max(whole.prompt_lengths(_LONGEST))


def longest_row(plan: Plan) -> int | None:
    """Tokens of the longest prompt and of a completion; None where images or an environment add to them."""
    prompt = None if _given(plan, "environment_factory", "rollout_func") else longest_prompt(plan)
    completion = plan.args.max_completion_length
    return None if prompt is None or completion is None else prompt + completion


def first_prompts(plan: Plan, count: int) -> list[list[int]]:
    """Tokens of the run's first prompts, rendered without images; of a sentence where an environment makes them."""
    rows = plan.first_rows
    texts = []
    if rows is not None and "prompt" in rows.column_names:
        first = rows.select(range(min(count, len(rows))))
        seen = bool(IMAGES & set(rows.column_names))
        whole = replace(plan, train_dataset=first)
        texts = [problem_text(prompt) for prompt in first["prompt"]] if seen else whole.rendered
    found: list[list[int]] = plan.tokenizer([text for text in texts if text] or ["What is 1 + 1?"])["input_ids"]
    return found


def check_context(plan: Plan, config: Any) -> None:
    """The longest prompt and a completion fit into the model's context. Images are not counted."""
    args = plan.args
    completion = plan.args.max_completion_length
    contexts = [getattr(config.get_text_config(), "max_position_embeddings", None)]
    # vLLM may serve a shorter context than the model has.
    contexts += [args.vllm_max_model_length] if args.use_vllm else []
    context = min((length for length in contexts if length is not None), default=None)
    if context is None or completion is None:
        return
    prompt = longest_prompt(plan)
    if prompt is not None and prompt + completion > context:
        raise ValueError(
            f"The longest prompt ({prompt} tokens) and max_completion_length ({completion}) are {prompt + completion} "
            f"tokens, but the model's context is {context}. Lower max_completion_length, leave the long prompts out, "
            "or extend the context (rope_scaling)."
        )


def check_adapter(plan: Plan, config: Any) -> None:
    """Attention, adapter and packing fit the model, which is built for it on the meta device, without weights."""
    adapter = copy.deepcopy(plan.kwargs.get("peft_config"))
    given = plan.args.model_init_kwargs
    attention = given.get("attn_implementation") if isinstance(given, dict) else None
    asked = adapter or attention or plan.args.per_device_token_budget
    if asked is None or type(config) not in AutoModelForCausalLM._model_mapping:
        return
    if is_deepspeed_zero3_enabled():
        # Under ZeRO-3 transformers would shard this model too, which the meta device cannot do.
        return
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
    except ImportError:
        # A kernel may be missing on the machine of the check.
        return
    except ValueError as error:
        raise ValueError(f"attn_implementation: {error}") from error
    check_token_budget(plan.args, plan.objective, method_of(built, plan.args))
    if adapter is None:
        return
    from peft import get_peft_model

    # The initial values do not matter here, and some (pissa, corda) are computed from the model's weights.
    adapter.init_lora_weights = True
    try:
        get_peft_model(built, adapter, low_cpu_mem_usage=True)
    except ValueError as error:
        single = isinstance(getattr(adapter, "target_modules", None), str)
        hint = " One name alone is a pattern of whole paths, such as .*q_proj." if single else ""
        names = sorted({name.rpartition(".")[2] for name, part in built.named_modules() if isinstance(part, Linear)})
        layers = f"(Layers of the model: {', '.join(names)}.)"
        raise ValueError(f"lora_r, lora_target_modules: {error}{hint} {layers}") from error


def validate_baseline(plan: Plan, config: Any) -> None:
    """The baseline accepts the run: a value table is of these prompts, this model and this reward. It is given groups
    of unequal size, if there will be some."""
    if validates(plan.baseline):
        plan.baseline.validate(run_context(plan, config))
    if plan.args.max_generations is None:
        return
    try:
        try_ragged(plan.baseline, (plan.prompt_ids or [])[:_TRIED])
    # The baseline may be anybody's.
    except Exception as error:
        raise ValueError(
            "max_generations gives prompts unequal numbers of rollouts, and baseline "
            f"'{baseline_name(plan.baseline)}' does not take them ({type(error).__name__}: {error}). Leave "
            "max_generations out, or take another baseline: rloo, basis_history."
        ) from error


WITH_MODEL: tuple[Callable[[Plan, Any], None], ...] = (check_context, check_adapter, validate_baseline)


def validates(baseline: Baseline) -> bool:
    """Whether the baseline has a check of its own (`Baseline.validate`)."""
    return type(baseline).validate is not Baseline.validate


def run_context(plan: Plan, config: Any) -> RunContext:
    """What `Baseline.validate` may look at. A streamed dataset's prompts are not known beforehand, and left out."""
    prompts: dict[str, str] = {}
    texts: dict[str, str] = {}
    ids = plan.prompt_ids
    if ids is not None:
        given = plan.train_dataset["prompt"] if "prompt" in plan.train_dataset.column_names else [""] * len(ids)
        prompts = dict(zip(ids, map(fingerprint, plan.rendered), strict=True))
        # A prompt that an environment makes is known once it was drawn.
        texts = {name: text for name, text in zip(ids, map(problem_text, given), strict=True) if text}
    sampling = sampling_of(plan.args)
    weights = plan.args.reward_weights
    provenance = run_provenance(config, plan.tokenizer, plan.reward_funcs, sampling, weights)
    return RunContext(prompts=prompts, provenance=provenance, texts=texts, reward_range=reward_range_of(plan))


def reward_range_of(plan: Plan) -> tuple[float, float] | None:
    """Least and largest reward of a rollout, where all reward functions declare theirs."""
    # The environments' own rewards have the weight 1.
    own = [each for each in plan.episodes if each.owns_reward]
    if len(plan.environments) > 1 or (plan.environments and not plan.episodes):
        return None
    weights = plan.args.reward_weights or [1.0] * len(plan.reward_funcs)
    # A belief that knows the range need not learn it from rewards.
    return declared_range([*plan.reward_funcs, *own], [*weights, *[1.0] * len(own)])


def with_tools(args: BasisConfig, tools: Sequence[Any]) -> dict[str, Any]:
    """What a chat template is given besides the conversation."""
    return {**(args.chat_template_kwargs or {}), **({"tools": list(tools)} if tools else {})}


def sampling_of(args: BasisConfig) -> Sampling:
    """How the training draws its rollouts, for a value table that must draw them in the same way."""
    return Sampling(
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        generation_kwargs=generation_kwargs_of(args),
    )


# What a Python user hands over, made into the objects that the trainer works with.


def as_config(args: BasisConfig | None, model: Any) -> BasisConfig:
    """The settings. If there are none: TRL's defaults, with a folder that is named after the model.

    Raises:
        ValueError: something else, such as TRL's `GRPOConfig` or a class.
    """
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        return BasisConfig(f"{name.rstrip('/').split('/')[-1]}-BASIS")
    _refuse_class("args", args)
    if not isinstance(args, BasisConfig):
        raise ValueError(f"args must be a BasisConfig, got {type(args).__name__}; it takes the same settings.")
    return args


def as_object(what: str, given: Any, known: Mapping[str, type], base: type) -> Any:
    """A baseline or a prompt sampler: by its registered name, as ``module:Class``, or the object itself.

    Raises:
        ValueError: an unknown name, a class, or an object that is none of a subclass of `base`.
    """
    if isinstance(given, str):
        return build(what, known, base, given, {})
    _refuse_class(what, given)
    if not isinstance(given, base):
        raise ValueError(
            f"{what} must be a name ({', '.join(known)}), 'module:Class' or an object of a subclass of "
            f"{base.__name__}, got {kind_of(given)}."
        )
    return given


def as_rewards(reward_funcs: Any, args: BasisConfig) -> list[Any]:
    """The reward functions as a list; names, also those with a module, are built by `build_reward`.

    What is neither, such as a Hub id with a slash, is a reward model, as in TRL.

    Raises:
        ValueError: an unknown name, or a class.
    """
    if reward_funcs is None:
        return []
    given = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    return [_as_reward(each, args) for each in given]


def _as_reward(given: Any, args: BasisConfig) -> Any:
    if not isinstance(given, str):
        _refuse_class("reward_funcs", given)
        return given
    # TRL loads reward models itself.
    if "/" in given or Path(given).is_dir():
        return given
    return build_reward(given, {}, {"max_completion_length": args.max_completion_length})


def as_dataset(rows: Any, what: str) -> Any:
    """A list of rows, each a dictionary, as a `Dataset`, also within a mapping of several; everything else as it is.

    Raises:
        ValueError: a list that is empty or holds something else than dictionaries, a name.
    """
    if isinstance(rows, str):
        raise ValueError(
            f"{what} is the name '{rows}'; load it first: "
            f"basis_rl.data.load_prompts(DataArguments('{rows}'), conversational=True)."
        )
    if isinstance(rows, dict):
        return {name: as_dataset(each, f"{what}['{name}']") for name, each in rows.items()}
    # A stream has no public name for its format.
    format_type = rows.format["type"] if isinstance(rows, Dataset) else getattr(rows, "_formatting", None)
    if format_type not in (None, "custom"):
        # Formats such as numpy and torch give arrays, where everybody expects texts and lists, and round numbers.
        return rows.with_format(None)
    if not isinstance(rows, Sequence):
        return rows
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(
            f"{what} must be a Dataset or a list of rows, such as [{{'prompt': '1 + 1 =', 'solution': '2'}}, ...]."
        )
    columns = list(rows[0])
    for index, row in enumerate(rows):
        if set(row) != set(columns):
            raise ValueError(f"{what}: row {index} has the columns {list(row)}, row 0 has {columns}.")
    return Dataset.from_list([dict(row) for row in rows])


def _refuse_class(what: str, given: Any) -> None:
    """Raise ValueError for a class where an object is needed."""
    if isinstance(given, type):
        raise ValueError(f"{what} must be an object, and {given.__name__} is a class: give {given.__name__}(...).")
