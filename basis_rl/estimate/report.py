"""The estimates of a run in words: its batches, memory of a GPU, disk space, memory of a rollout server."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from trl import ModelConfig

from basis_rl.baselines import Baseline, LearnedBaseline
from basis_rl.estimate.footprint import model_size, setting_of
from basis_rl.estimate.memory import Launch, ModelSize, Part, Phase, Scoring, Setting, kv_cache, memory_parts, peak
from basis_rl.run.disk import GIB, checkpoint_bytes, free_bytes
from basis_rl.trainer import BasisConfig

Warn = Callable[[str], None]
_PHASES: Mapping[Phase, str] = {
    "always": "held all the time",
    "backward": "at the peak of a backward pass",
    "step": "in the optimizer step",
    "generation": "while generating",
}
_SCORED: Mapping[Scoring, str] = {
    "padded": "with padding",
    "packed": "without padding",
    "shared": "without padding and what rollouts begin with in common once",
}
_NOT_COUNTED = (
    "The figures for weights, gradients and optimizer are exact. The rest is an estimate for a micro-batch in which "
    "every row has the longest prompt, not shared, and max_completion_length tokens. Not counted: the CUDA context and "
    "NCCL (1 to 2 GiB), fragmentation, compiled graphs, tools, images, and what a critic keeps for its backward pass."
)


@dataclass(frozen=True)
class Footprint:
    """What the estimates need.

    Attributes:
        model, args: the model's and the training's settings.
        config: the model's configuration.
        launch: how and on how many GPUs the run is launched.
        prompt: the longest prompt in tokens.
        gpu_memory: memory of a GPU in GiB, if the user gave it.
        baseline: the baseline, which may have a module of its own.
    """

    model: ModelConfig
    args: BasisConfig
    config: Any
    launch: Launch
    prompt: int
    gpu_memory: float | None
    baseline: Baseline

    @cached_property
    def size(self) -> ModelSize:
        """Size of the model. Raises ValueError if the formulas do not hold for its architecture."""
        return model_size(self.config, self.model, trust_remote_code=self.args.trust_remote_code)

    @cached_property
    def setting(self) -> Setting:
        """The training settings that memory depends on."""
        return setting_of(self.args, self.model, self.config, self.launch, self.prompt)

    @property
    def length(self) -> int:
        """Length of the longest sequence in tokens."""
        return self.prompt + self.args.max_completion_length

    @cached_property
    def memory(self) -> float | None:
        """Memory of a GPU in bytes, or None if it is not known."""
        if self.gpu_memory is not None:
            return self.gpu_memory * GIB
        return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None

    def module_bytes(self, learning: float) -> float:
        """Bytes of the baseline's own module, 0 if it has none: 4 for each weight, and `learning` if it is trained."""
        if not isinstance(self.baseline, LearnedBaseline):
            return 0.0
        frozen = self.baseline.frozen_parameters(self.config)
        return (4.0 + learning) * self.baseline.module_parameters(self.config) - learning * frozen

    @property
    def learned(self) -> float:
        """Bytes of that module on each GPU, with gradients and AdamW's two moments.

        A critic that is a whole model is sharded if the policy is sharded.
        """
        sharded = self.launch.engine == "fsdp" or (self.launch.engine == "deepspeed" and self.launch.stage == 3)
        is_head = getattr(self.baseline, "reads_hidden_states", True)
        return self.module_bytes(12.0) / (self.launch.world if sharded and not is_head else 1)

    @property
    def sequence(self) -> float:
        """Bytes of the KV cache of one sequence in vLLM."""
        return kv_cache(self.size, 1, self.length, self.setting.compute, self.setting.compute)

    @property
    def served_weights(self) -> float:
        """Bytes of the weights in vLLM."""
        return float(self.setting.compute * self.size.parameters)


def _steps_of_an_epoch(args: BasisConfig, problems: int) -> int:
    """The last one may have fewer micro-batches than the others."""
    batches = problems // (args.generation_batch_size // args.num_generations)
    return -(-batches * args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)


def optimizer_steps(args: BasisConfig, problems: int) -> int:
    """Optimizer steps of the whole run, as transformers counts them."""
    if args.max_steps > 0:
        return args.max_steps
    return math.ceil(args.num_train_epochs * _steps_of_an_epoch(args, problems))


def arithmetic(args: BasisConfig, problems: int, warn: Warn) -> str:
    """Batches, optimizer steps and epochs in words."""
    prompts = args.generation_batch_size // args.num_generations
    each = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    micro = args.steps_per_generation * args.num_iterations
    updates = micro / args.gradient_accumulation_steps
    batches = problems // prompts
    total = optimizer_steps(args, problems)
    epochs, rest = divmod(total, max(1, _steps_of_an_epoch(args, problems)))
    generated = epochs * batches + rest / updates
    passes = f", {args.num_iterations} times over" if args.num_iterations > 1 else ""
    used = f"{updates:g} optimizer step(s) of {each} rollouts each{passes}"
    lines = [
        f"One generation batch: {prompts} prompts x {args.group_size} rollouts = {args.generation_batch_size} "
        f"rollouts on {args.world_size} process(es), used for {used}.",
        f"One optimizer step: {args.world_size} process(es) x {args.per_device_train_batch_size} rollouts x "
        f"{args.gradient_accumulation_steps} accumulated micro-batch(es) = {each} rollouts.",
        f"One epoch: {problems} problems = {batches} generation batches"
        + (f", {problems - batches * prompts} problems left over each time." if problems % prompts else "."),
        f"The run: {total} optimizer steps = {generated:g} generation batches, "
        f"{int(generated * args.generation_batch_size)} rollouts of at most {args.max_completion_length} tokens.",
    ]
    if batches:
        times = generated / batches
        seen = f"each prompt is seen {times:.3g} time(s), answered {times * args.num_generations:.3g} time(s)"
        lines.append(f"That is {times:.3g} epoch(s): {seen}.")
    if generated != int(generated) or updates != int(updates):
        part = f"{total} optimizer steps are {generated:g} generation batches of {updates:g} steps, some used in part"
        warn(f"{part}. Choose max_steps and gradient_accumulation_steps so that both numbers are whole.")
    return "\n".join(lines)


def memory(run: Footprint, warn: Warn) -> str:
    """The memory estimate by parts, its peak, and whether a GPU has enough memory for it."""
    try:
        size = run.size
        setting = run.setting
    except ValueError as error:
        return f"No estimate: {error}."
    parts = memory_parts(size, setting)
    if run.learned:
        parts.append(Part("the baseline's module, with its AdamW", run.learned))
    parts += _colocated(run, warn)
    total = peak(parts)
    lines = [
        f"{size.parameters:,} parameters, {size.trainable:,} trained, {size.layers} layers; "
        f"{run.launch}; micro-batches of {setting.micro_batch} "
        f"tokens, gradient checkpointing {'on' if setting.checkpointing else 'off'}. "
        f"By the model's configuration, rollouts are scored {_SCORED[setting.scoring]}; a run asks the model itself."
    ]
    for phase, title in _PHASES.items():
        rows = [part for part in parts if part.phase == phase]
        lines += [f"  {title}:"] if rows else []
        lines += [f"    {part.name:38s}{part.bytes / GIB:9.2f} GiB" for part in rows]
    lines.append(f"  {'total at the most demanding phase':40s}{total / GIB:9.2f} GiB")
    if setting.optimizer_states is None:
        lines.append(f"The state of the optimizer '{run.args.optim}' is not counted, because its size is not known.")
    if run.model.load_in_4bit or run.model.load_in_8bit:
        lines.append("Quantization is not taken into account: the weights will be smaller than estimated.")
    return "\n".join([*lines, _NOT_COUNTED, *_compared(run, total, warn)])


def _compared(run: Footprint, total: float, warn: Warn) -> list[str]:
    """The estimate beside the memory that a GPU has."""
    if run.memory is None:
        lines = ["No GPU is visible here. Give its memory with --gpu_memory GIB to compare the estimate with it."]
        if not run.args.use_cpu:
            lines.append("`basis-rl train` would stop at once here. To train on this CPU: --use_cpu true --bf16 false.")
        return lines
    if total <= run.memory:
        return [f"A GPU has {run.memory / GIB:.1f} GiB."]
    needs = f"The training needs about {total / GIB:.1f} GiB on each GPU, but a GPU has {run.memory / GIB:.1f} GiB"
    rows = "per_device_train_batch_size and raise gradient_accumulation_steps"
    smaller = f"lower {'per_device_token_budget' if run.setting.budgeted else rows}"
    warn(f"{needs}. Shard over more GPUs (accelerate_configs/zero3.yaml), {smaller}, or train adapters (use_peft).")
    return []


def _colocated(run: Footprint, warn: Warn) -> list[Part]:
    """vLLM's share of a GPU that it shares with the training."""
    args = run.args
    if not args.use_vllm or args.vllm_mode != "colocate":
        return []
    needed = (run.served_weights + run.sequence) / args.vllm_tensor_parallel_size
    phase: Phase = "generation" if args.vllm_enable_sleep_mode else "always"
    share = args.vllm_gpu_memory_utilization
    if run.memory is None:
        return [Part("vLLM: weights and KV of one sequence", needed, phase)]
    if share * run.memory < needed:
        has = f"vLLM may use {share:g} of a GPU, {share * run.memory / GIB:.1f} GiB"
        needs = f"its weights and the KV cache of one sequence need {needed / GIB:.1f} GiB"
        warn(f"{has}, but {needs}. Raise vllm_gpu_memory_utilization.")
    return [Part(f"vLLM: {share:g} of the GPU", share * run.memory, phase)]


def server_memory(run: Footprint) -> str:
    """What a rollout server needs; empty where the formulas do not hold."""
    try:
        weights = run.served_weights / GIB
        cache = run.sequence / GIB
    except ValueError:
        return ""
    sequence = f"{cache:.2f} GiB of KV cache for each sequence of {run.length} tokens"
    return f" It needs {weights:.1f} GiB for the weights, and {sequence}."


def streaming(run: Footprint, room: int | None) -> str:
    """What is in flight with ``rollouts: stream``, how old it becomes, and what it asks of the server and of rewards.

    Args:
        run: of which ``batches_in_flight`` is set.
        room: tokens that the server's KV cache has room for; None if it is not known.
    """
    args = run.args
    batches = args.batches_in_flight or 0
    rollouts = batches * args.generation_batch_size
    # By Little's law: so many batches are under way whenever one is taken.
    age = batches * args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    tokens = rollouts * run.length
    held = f"{tokens:,} tokens of {run.length} per rollout at most"
    with suppress(ValueError):
        held += f", {rollouts * run.sequence / GIB:.2f} GiB of KV cache"
    if room is not None:
        held += f"; the server has room for {room:,} tokens" + ", others wait in its queue" * (room < tokens)
    return (
        f"{batches} generation batch(es) are in flight while one is trained on: {rollouts // args.num_generations} "
        f"prompts, {rollouts} rollouts, {held}.\nA rollout begins about {age:.3g} optimizer steps before it is first "
        f"trained on, at most {args.max_staleness} (max_staleness). Tokens drawn after new weights came are younger.\n"
        f"A rollout that takes more than {args.rollout_timeout:g} s (rollout_timeout) has no reward.\nReward functions "
        "are called from other threads, with all rollouts of a prompt as they end, and not with batches: one that "
        "compares rollouts of different prompts is wrong here."
    )


def disk(run: Footprint, steps: int, warn: Warn) -> str:
    """The disk space that the checkpoints of a run of so many optimizer steps need, and whether it is free."""
    args = run.args
    if args.save_strategy == "no":
        return "No checkpoints are saved (save_strategy)."
    free = free_bytes(args.output_dir)
    try:
        saved = run.size.trainable if run.model.use_peft else run.size.parameters
    except ValueError as error:
        return f"No estimate: {error}. {free / GIB:.1f} GiB are free."
    one = weights = float(saved * run.setting.trainable_bytes)
    if not args.save_only_model:
        kept_by_optimizer = 12.0 if run.launch.engine == "deepspeed" else 8.0
        one = checkpoint_bytes(saved, run.size.trainable, run.setting.trainable_bytes, kept_by_optimizer)
        one += run.module_bytes(8.0)
    limit = args.save_total_limit
    # One is being written.
    held = (limit or 1) + 1
    if args.save_strategy == "steps" and args.save_steps > 0:
        every = args.save_steps if args.save_steps >= 1 else math.ceil(steps * args.save_steps)
        # The last step is saved as well.
        written = math.ceil(steps / every)
        held = min(held, written) if limit else written
    together = one * held + weights
    kept = "all of them are kept (save_total_limit)" if not limit else f"{limit} are kept (save_total_limit)"
    if together > free:
        needs = f"{held} checkpoint(s), with the one that is being written, and the final model"
        has = f"output_dir has {free / GIB:.2f} GiB of free disk space"
        warn(f"{has}, but {needs} need {together / GIB:.2f} GiB. Free some space, or choose another output_dir.")
    return f"A checkpoint takes about {one / GIB:.2f} GiB; {kept}. {free / GIB:.1f} GiB are free at {args.output_dir}."
