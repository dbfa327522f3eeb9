"""The sections of `basis-rl check` that need no weights: first those that follow from recipe and data alone, then those
that look at artefacts, vLLM server, packages and Hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from statistics import median_high
from typing import Any

import yaml
from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from basis_rl.baselines import Baseline
from basis_rl.clusters import PromptClusters
from basis_rl.data import problem_text
from basis_rl.engine.adapter import lora_missing
from basis_rl.engine.client import Client, check_served
from basis_rl.environments import Episode
from basis_rl.estimate import report
from basis_rl.estimate.memory import Launch
from basis_rl.estimate.report import Footprint, Warn, server_memory
from basis_rl.names import missing_extra
from basis_rl.recipe.keys import Recipe
from basis_rl.rewards.base import GoldChecker
from basis_rl.rewards.judge import JudgeReward
from basis_rl.run.errors import RequestRefused, RolloutError
from basis_rl.run.hub import refuse_push
from basis_rl.samplers import sampler_name
from basis_rl.trainer import BasisConfig
from basis_rl.trainer.model_check import rounding_note
from basis_rl.trainer.plan import Plan
from basis_rl.trainer.selection import tried_belief
from basis_rl.types import RunContext
from basis_rl.values import ValueTable
from basis_rl.values.provenance import mismatches

# Settings that decide a run and are often left to their defaults, so they are shown even then.
_SHOWN = (
    "learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm", "loss_type", "importance_sampling_level",
    "epsilon", "epsilon_high", "beta", "temperature", "top_p", "max_completion_length", "mask_truncated_completions",
    "bf16", "gradient_checkpointing", "optim", "seed",
)  # fmt: skip
# Above this, the ratio of a sequence is hardly ever clipped (GSPO, Zheng et al. 2025, Sec. 5.1: 3e-4 and 4e-4).
_LARGE_SEQUENCE_EPSILON = 0.01


def configuration(recipe: Recipe, args: BasisConfig, launch: Launch, warn: Warn) -> str:
    """The recipe after overrides, and the defaults that decide most beside it."""
    correction = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode") if args.use_vllm else ()
    settings = {name: getattr(args, name) for name in (*_SHOWN, *correction)}
    # transformers keeps some settings as enumerations.
    defaults = {"dtype": recipe.model.dtype, **{k: getattr(v, "value", v) for k, v in settings.items()}}
    left = {name: value for name, value in defaults.items() if name not in recipe.resolved}
    given = yaml.safe_dump(recipe.resolved, sort_keys=False).rstrip().replace("\n", "\n  ")
    shown = ", ".join(f"{name} {value}" for name, value in left.items())
    if args.importance_sampling_level == "sequence" and args.epsilon > _LARGE_SEQUENCE_EPSILON:
        warn(
            f"epsilon is {args.epsilon:g}, which hardly ever clips the ratio of a whole sequence: GSPO's paper has "
            "epsilon 3e-4 and epsilon_high 4e-4."
        )
    low = recipe.model.dtype in ("bfloat16", "float16")
    if low and launch.engine == "plain" and not recipe.model.use_peft:
        warn(rounding_note(recipe.model.dtype, args.learning_rate))
    return f"  {given}\nNot given, and so: {shown}.\nLaunched as: {launch}."


def sampling(plan: Plan) -> str:
    """What a prompt sampler does to the objective.

    Raises:
        ValueError: it cannot draw a first batch, by the belief of the baseline or by a separate one.
    """
    sampler = plan.sampler
    dataset = plan.train_dataset
    texts = (problem_text(row.get("prompt", "")) for row in dataset)
    tried_belief(sampler, plan.baseline, plan.prompt_ids or [], texts, plan.args)
    parameters = ", ".join(f"{key} {value}" for key, value in sampler.parameters.items())
    drawn = f"Prompts are drawn by `{sampler_name(sampler)}`" + (f" ({parameters})" if parameters else "")
    if plan.args.max_generations is not None:
        least = plan.baseline.min_group_size
        drawn += f", with {least} to {plan.args.max_generations} rollouts for each, by the belief about it"
    if sampler.max_refills:
        return f"{drawn}: groups whose rewards are all equal are drawn again, {sampler.max_refills} times at most."
    if sampler.correct:
        low, high = sampler.clip
        return f"{drawn}; advantages are weighed by the ratio to a uniform draw, clipped to {low:g} to {high:g}."
    undo = ", which `prompt_sampler_kwargs: {correct: true}` undoes" if "correct" in sampler.parameters else ""
    return f"{drawn}: training maximises the mean reward over the prompts that it draws, not over all alike{undo}."


def columns(plan: Plan, warn: Warn) -> str:
    """Where problems and golds come from, the columns, and which of them rewards and environments read."""
    dataset = plan.train_dataset
    said, *odd = dataset.info.description.split("\n")
    # An environment adds to the prompts what tells such rows apart.
    for sentence in () if plan.episodes else odd:
        warn(f"{sentence}.")
    lines = [f"{said}."] if said else []
    lines.append(
        f"{len(dataset)} problems after duplicates and what is held out; columns: {', '.join(dataset.column_names)}."
    )
    read = dataset.column_names if plan.reads is None else sorted(plan.reads & set(dataset.column_names))
    lines.append(f"Reward functions and environments read {', '.join(read) or 'no column'}.")
    return "\n".join(lines)


def tools(found: Sequence[Any], args: BasisConfig) -> str:
    """What the model may call, how often, and how programs are held."""
    rounds = args.max_tool_calling_iterations
    lines = [
        f"{', '.join(tool.__name__ for tool in found)}; calls of a rollout are answered "
        f"{'without a limit' if rounds is None else f'{rounds} times at most'}. max_completion_length "
        f"({args.max_completion_length}) holds all turns together, and what the tools say."
    ]
    lines += [f"{tool.__name__}: {tool.isolation}." for tool in found if getattr(tool, "isolation", None)]
    return "\n".join(lines)


def environment(plan: Plan, episode: Episode) -> str:
    """An episode without a model: what the model sees, what the tools answer, the rewards."""
    tools = ", ".join(tool["function"]["name"] for tool in episode.tools) or "none"
    tokens = len(plan.tokenizer(plan.as_text(episode, episode.prompt), add_special_tokens=False)["input_ids"])
    rewards = ", ".join(f"{name} {score:g}" for name, score in episode.rewards.items())
    known = "a row of the dataset decides about the problem"
    if not episode.repeats:
        known = "the environment draws its problems itself: resets with one row say different things"
    return (
        f"Tools: {tools}. The first prompt has {tokens} tokens; {known}.\n"
        "--- one episode, in which each tool is called once, with arguments made up from its type hints\n"
        f"{plan.as_text(episode, [*episode.prompt, *episode.completion])}\n--- rewards: {rewards}"
    )


def prompts(plan: Plan, lengths: Sequence[int]) -> str:
    """Three prompts, each with the gold that the reward functions are given, and how long all of them are."""
    dataset = plan.train_dataset
    text = isinstance(dataset[0]["prompt"], str)
    form = "plain text, without a chat template" if text else "conversations in the chat template"
    lines = [f"Prompts are {form}, {min(lengths)} to {max(lengths)} tokens, median {median_high(lengths)}."]
    read = sorted((plan.reads or set()) & set(dataset.column_names) - {"prompt"})
    for number, (prompt, row) in enumerate(zip(plan.rendered[:3], dataset, strict=False), 1):
        lines.append(f"--- prompt {number}\n{prompt}")
        lines += [f"--- its gold, in '{column}': {' '.join(str(row[column]).split())[:200]}" for column in read]
    return "\n".join([*lines, "---"])


def answers(plan: Plan, warn: Warn) -> str:
    """Where the reward functions look for the answer, as far as they have a `reading`; and what a judge costs."""
    lines = [f"{reward.__name__} {reward.reading}." for reward in plan.reward_funcs if hasattr(reward, "reading")]
    boxes = [reward.__name__ for reward in plan.reward_funcs if getattr(reward, "answer_in", "") == "box"]
    if boxes and any(plan.rendered) and not any(r"\boxed" in text for text in plan.rendered):
        warn(
            f"{boxes[0]} reads the answer from a \\boxed{{}}, but no prompt asks for one, so that every rollout may be "
            "wrong. Ask for it in prompt_template, or set another place, such as reward_kwargs: {answer_in: last_line}."
        )
    for judge in (reward for reward in plan.reward_funcs if isinstance(reward, JudgeReward)):
        calls = f"At most {plan.args.generation_batch_size} calls per generation batch"
        lines.append(f"{calls}, {judge.chat.concurrency} at a time in each process; nothing is asked twice.")
        if (why := judge.trial()) is not None:
            warn(f"The judge {judge.chat} {why}")
    return "\n".join(lines)


def golds(dropped: int, plan: Plan, warn: Warn) -> str:
    """What the gold self-check found."""
    if not any(isinstance(reward, GoldChecker) for reward in plan.reward_funcs):
        return "No reward function here can check the golds (0 problems dropped)."
    if dropped:
        problems = dropped + len(plan.train_dataset)
        warn(f"{dropped} of {problems} problems are dropped: their golds do not verify against themselves.")
    return f"The golds passed the checks of the reward functions ({dropped} problems dropped)."


def missing_artefact(recipe: Recipe, key: str, problems: int, arguments: str, warn: Warn) -> str:
    """How to build the value table or codebook that does not exist yet, and what that costs."""
    run = recipe.run
    args = recipe.args
    command = f"basis-rl {key} {arguments}"
    path = (run.baseline_kwargs or {})[key]
    what = {"values": "value table", "clusters": "prompt codebook"}[key]
    warn(f"There is no {what} at '{path}' yet. Build it first: `{command}`.")
    cost = f"This embeds {problems} prompts with {run.clusters_encoder} and samples no rollouts."
    if key == "values":
        rollouts = problems * run.values_num_rollouts
        cost = (
            f"This samples {problems} prompts x {run.values_num_rollouts} (--values_num_rollouts) = {rollouts} "
            f"rollouts of at most {args.max_completion_length} tokens, as many as "
            f"{rollouts / args.generation_batch_size:.0f} generation batches of the training. It is needed only once: "
            "every later run of this model on these prompts can use the same table."
        )
    return f"No {what} at '{path}' yet. Build it with\n  {command}\n{cost}"


def artefact(baseline: Baseline, context: RunContext, warn: Warn) -> str:
    """Describe the value table or codebook: its size and which training prompts it covers."""
    table = getattr(baseline, "values", None)
    found = table if isinstance(table, ValueTable) else getattr(baseline, "clusters", None)
    if not isinstance(found, ValueTable | PromptClusters):
        return f"{type(baseline).__name__} accepts this run."
    covered = sum(prompt_id in found for prompt_id in context.prompts)
    covers = f"It covers {covered} of {len(context.prompts)} training prompts"
    if isinstance(found, PromptClusters):
        size = f"{len(found)} clusters"
        return f"Prompt codebook {found.source}: {size}. {covers}; the others are embedded when they first occur."
    rollouts = sum(len(found.rewards(prompt_id)) for prompt_id in found.prompt_ids) / len(found)
    for problem in mismatches(found.provenance, context.provenance):
        warn(f"The value table does not match this run, but accept_mismatch allows it: {problem}.")
    known = ", ".join(f"{key} {value}" for key, value in found.provenance.items() if key != "probe")
    return (
        f"Value table {found.source}: {len(found)} prompts, {rollouts:.4g} scored rollouts each, mean reward "
        f"{float(found.means.mean()):.3f}. {covers}. Its provenance was checked against this run: {known}."
    )


def server(recipe: Recipe, footprint: Footprint, warn: Warn) -> str:
    """Which engine generates; for a server, whether it is up, serves this model and takes sequences of this length."""
    args = footprint.args
    model = str(recipe.model.model_name_or_path)
    if not args.use_vllm:
        return "transformers generates the rollouts, in the training processes. vLLM is faster (use_vllm)."
    if args.vllm_mode == "colocate":
        share = args.vllm_gpu_memory_utilization
        return f"vLLM generates the rollouts, in the training processes, with {share:g} of each GPU's memory."
    need = server_memory(footprint)
    if recipe.run.serve:
        return f"The training starts a vLLM server of its own on port {args.vllm_server_port}.{need}"
    urls = args.server_urls
    found = " ".join(_server_at(url, model, footprint, warn) for url in urls)
    return f"vLLM generates the rollouts, at {' and '.join(urls)}. {found}{need}"


def _server_at(url: str, model: str, footprint: Footprint, warn: Warn) -> str:
    """What a server that is there already says of itself."""
    length = footprint.length
    try:
        limit = check_served(url, model)
    except (RolloutError, RequestRefused) as error:
        start = f"Start it before the training: `basis-rl serve {quote(model)}`."
        warn(f"There is no vLLM server at {url} ({error}). {start}")
        return f"At {url} no server answers at present."
    except ValueError as error:
        warn(str(error))
        return f"The server at {url} has another model."
    if footprint.args.vllm_lora_sync == "adapter" and (missing := lora_missing(Client(url))):
        warn(missing)
    if limit is not None and limit < length:
        warn(
            f"The vLLM server at {url} accepts {limit} tokens, but the longest prompt ({footprint.prompt}) and "
            f"max_completion_length ({footprint.args.max_completion_length}) together have {length}. Start it with "
            f"--max-model-len {length} or more."
        )
    return f"The server at {url} has this model and accepts up to {limit} tokens; {length} are needed."


def streaming(recipe: Recipe, footprint: Footprint) -> str:
    """What streamed rollouts ask of the server, of which the servers that are there already tell their room."""
    urls = [] if recipe.run.serve else footprint.args.server_urls
    rooms = [room for each in urls if (room := Client(each).cache_tokens()) is not None]
    return report.streaming(footprint, sum(rooms) if rooms else None)


def extras(args: BasisConfig, launch: Launch, warn: Warn) -> None:
    """Warn about packages that the training needs and that are not installed here; another machine may have them."""
    wanted = {"vllm": ("use_vllm", args.use_vllm), "deepspeed": (str(launch), launch.engine == "deepspeed")}
    for module, (what, needed) in wanted.items():
        if needed and (message := missing_extra(module, what)):
            warn(message)


def hub(args: BasisConfig, warn: Warn) -> str:
    """Whether the model can be pushed.

    Raises:
        ValueError: the token is missing or refused, the repository's name is invalid, or the token may not push to it.
    """
    if not args.push_to_hub:
        return "Nothing is pushed (push_to_hub)."
    name = args.hub_model_id or Path(os.path.abspath(args.output_dir)).name
    try:
        validate_repo_id(name)
        account = HfApi(token=args.hub_token).whoami()
    except Exception as error:
        refuse_push(name, error)
        # An error of the network, which may be fine by the time of the push.
        warn(f"The Hub cannot be reached ({type(error).__name__}), so '{name}' was not checked for a push.")
        return f"The model will be pushed to '{name}'; whether that is possible was not checked."
    me = account["name"]
    groups = [group["name"] for group in account.get("orgs", [])]
    full = name if "/" in name else f"{me}/{name}"
    owner = full.split("/")[0]
    if owner not in [me, *groups]:
        member = f", member of {', '.join(groups)}" if groups else ""
        mine = f"the token belongs to {me}{member}"
        raise ValueError(f"hub_model_id: '{name}' belongs to '{owner}', but {mine}. Change the name or the token.")
    return f"The model will be pushed to '{full}', as {me}."
