"""The sections of `basis-rl check` that look beyond the recipe: artefacts, GPU memory, disk, vLLM server and Hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from basis_rl.baselines import Baseline, LearnedBaseline
from basis_rl.clusters import PromptClusters
from basis_rl.engine.client import Client
from basis_rl.estimate.footprint import Launch, model_size, setting_of
from basis_rl.estimate.memory import ModelSize, Part, Phase, Setting, kv_cache, memory_parts, peak
from basis_rl.names import missing_extra
from basis_rl.recipe.keys import Recipe, RunArguments
from basis_rl.recipe.objects import build_recipe_baseline
from basis_rl.run.artefacts import MissingArtefact
from basis_rl.run.disk import checkpoint_bytes, free_bytes
from basis_rl.run.errors import RequestRefused, RolloutError
from basis_rl.sandbox import isolation
from basis_rl.trainer import BasisConfig
from basis_rl.types import RunContext
from basis_rl.values import ValueTable
from basis_rl.values.provenance import mismatches

Warn = Callable[[str], None]
GIB = float(1 << 30)
_PHASES: Mapping[Phase, str] = {
    "always": "held all the time",
    "backward": "at the peak of a backward pass",
    "step": "in the optimizer step",
    "generation": "while generating",
}
_NOT_COUNTED = (
    "The figures for weights, gradients and optimizer are exact. The rest is an estimate for a micro-batch in which "
    "every row has the longest prompt and max_completion_length tokens. Not counted: the CUDA context and NCCL (1 to "
    "2 GiB), fragmentation, compiled graphs, tools and images."
)


def build_baseline(run: RunArguments) -> tuple[str | None, Baseline]:
    """Build the recipe's baseline. If its value table or codebook does not exist yet, a stand-in takes its place.

    Returns:
        The key of the missing artefact (``values`` or ``clusters``), or None; and the baseline.

    Raises:
        ValueError: as `build_recipe_baseline`, except for a missing artefact.
    """
    stand_ins: dict[str, Any] = {
        "values": ValueTable.from_rewards({"": [0.0, 1.0]}),
        "clusters": PromptClusters({"": 0}),
    }
    try:
        return None, build_recipe_baseline(run)
    except MissingArtefact:
        given = run.baseline_kwargs or {}
        key = next((key for key in stand_ins if isinstance(given.get(key), str)), None)
        if key is None:
            raise
        return key, build_recipe_baseline(replace(run, baseline_kwargs={**given, key: stand_ins[key]}))


def validates(baseline: Baseline) -> bool:
    """Whether the baseline has a check of its own (`Baseline.validate`)."""
    return type(baseline).validate is not Baseline.validate


def artefact(
    recipe: Recipe, baseline: Baseline, missing: str | None, context: RunContext, arguments: str, warn: Warn
) -> str:
    """Describe the value table or codebook: its size and which training prompts it covers.

    If it is missing, say how to build it and what that costs.

    Raises:
        ValueError: it exists but does not fit the run.
    """
    run = recipe.run
    if missing is not None:
        command = f"basis-rl {missing} {arguments}"
        path = (run.baseline_kwargs or {})[missing]
        what = {"values": "value table", "clusters": "prompt codebook"}[missing]
        warn(f"There is no {what} at '{path}' yet. Build it first: `{command}`.")
        return f"No {what} at '{path}' yet. Build it with\n  {command}\n{_cost(recipe, missing, len(context.prompts))}"
    baseline.validate(context)
    table, clusters = getattr(baseline, "values", None), getattr(baseline, "clusters", None)
    if isinstance(table, ValueTable):
        covered = sum(prompt_id in table for prompt_id in context.prompts)
        rollouts = sum(len(table.rewards(prompt_id)) for prompt_id in table.prompt_ids) / len(table)
        for problem in mismatches(table.provenance, context.provenance):
            warn(f"The value table does not match this run, but accept_mismatch allows it: {problem}.")
        known = ", ".join(f"{key} {value}" for key, value in table.provenance.items() if key not in ("probe",))
        return (
            f"Value table {table.source}: {len(table)} prompts, {rollouts:.4g} scored rollouts each, mean reward "
            f"{float(table.means.mean()):.3f}. It covers {covered} of {len(context.prompts)} training prompts. Its "
            f"provenance was checked against this run: {known}."
        )
    if isinstance(clusters, PromptClusters):
        covered = sum(prompt_id in clusters for prompt_id in context.prompts)
        return (
            f"Prompt codebook {clusters.source}: {len(clusters)} clusters. It covers {covered} of "
            f"{len(context.prompts)} training prompts; the others are embedded when they first occur."
        )
    return f"{type(baseline).__name__} accepts this run."


def learned_parameters(baseline: Baseline, config: Any, launch: Launch) -> float:
    """Parameters of the baseline's own module on each GPU; 0 if it has none.

    A critic that is a whole model is sharded if the policy is sharded.
    """
    if not isinstance(baseline, LearnedBaseline):
        return 0.0
    sharded = launch.engine == "fsdp" or (launch.engine == "deepspeed" and launch.stage == 3)
    share = launch.world if sharded and not baseline.reads_hidden_states else 1
    return baseline.module_parameters(config) / share


def _cost(recipe: Recipe, what: str, problems: int) -> str:
    if what == "clusters":
        return f"This embeds {problems} prompts with {recipe.run.clusters_encoder} and samples no rollouts."
    rollouts, args = problems * recipe.run.values_num_rollouts, recipe.args
    return (
        f"This samples {problems} prompts x {recipe.run.values_num_rollouts} (values_num_rollouts) = {rollouts} "
        f"rollouts of at most {args.max_completion_length} tokens, as many as "
        f"{rollouts / args.generation_batch_size:.0f} generation batches of the training. It is needed only once: "
        "every later run of this model on these prompts can use the same table."
    )


@dataclass(frozen=True)
class Plan:
    """What the estimates of memory, disk and server need.

    Attributes:
        recipe: the recipe.
        args: its training arguments.
        config: the model's configuration.
        launch: how and on how many GPUs the run is launched.
        prompt: the longest prompt in tokens.
        gpu_memory: memory of a GPU in GiB, if the user gave it.
        learned: parameters of the baseline's own module on each GPU.
    """

    recipe: Recipe
    args: BasisConfig
    config: Any
    launch: Launch
    prompt: int
    gpu_memory: float | None
    learned: float = 0.0

    @cached_property
    def size(self) -> ModelSize:
        """Size of the model. Raises ValueError if the formulas do not hold for its architecture."""
        return model_size(self.config, self.recipe.model, trust_remote_code=self.args.trust_remote_code)

    @cached_property
    def setting(self) -> Setting:
        """The training settings that memory depends on."""
        return setting_of(self.args, self.recipe.model, self.config, self.launch, self.prompt)

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


def memory(plan: Plan, warn: Warn) -> str:
    """The memory estimate by parts, its peak, and whether a GPU has enough memory for it."""
    try:
        parts = memory_parts(plan.size, plan.setting)
    except ValueError as error:
        return f"No estimate: {error}."
    if plan.learned:  # float32 weights and gradients, two moments of AdamW
        parts.append(Part("the baseline's module, with its AdamW", 16.0 * plan.learned))
    parts += _colocated(plan, warn)
    total = peak(parts)
    size = plan.size
    lines = [
        f"{size.parameters:,} parameters, {size.trainable:,} trained, {size.layers} layers; "
        f"{plan.launch}; micro-batches of {plan.setting.rows} x ({plan.prompt} + {plan.args.max_completion_length}) "
        f"tokens, gradient checkpointing {'on' if plan.setting.checkpointing else 'off'}."
    ]
    for phase, title in _PHASES.items():
        rows = [part for part in parts if part.phase == phase]
        lines += [f"  {title}:"] if rows else []
        lines += [f"    {part.name:38s}{part.bytes / GIB:9.2f} GiB" for part in rows]
    lines.append(f"  {'total at the most demanding phase':40s}{total / GIB:9.2f} GiB")
    if plan.setting.optimizer_states is None:
        lines.append(f"The state of the optimizer '{plan.args.optim}' is not counted, because its size is not known.")
    if plan.recipe.model.load_in_4bit or plan.recipe.model.load_in_8bit:
        lines.append("Quantization is not taken into account: the weights will be smaller than estimated.")
    lines.append(_NOT_COUNTED)
    if plan.memory is None:
        lines.append("No GPU is visible here. Give its memory with --gpu_memory GIB to compare the estimate with it.")
        if not plan.args.use_cpu:
            lines.append(
                "`basis-rl train` would stop at its start on this machine. To train on its CPU, add --use_cpu true "
                "--bf16 false."
            )
    elif total > plan.memory:
        warn(
            f"The training needs about {total / GIB:.1f} GiB on each GPU, but a GPU has {plan.memory / GIB:.1f} GiB. "
            "Shard over more GPUs (accelerate_configs/zero3.yaml), lower per_device_train_batch_size and raise "
            "gradient_accumulation_steps, or train adapters (use_peft)."
        )
    else:
        lines.append(f"A GPU has {plan.memory / GIB:.1f} GiB.")
    return "\n".join(lines)


def disk(plan: Plan, warn: Warn) -> str:
    """The disk space that the checkpoints need, and whether it is free."""
    args = plan.args
    if args.save_strategy == "no":
        return "No checkpoints are saved (save_strategy)."
    free = free_bytes(args.output_dir)
    try:
        saved = plan.size.trainable if plan.recipe.model.use_peft else plan.size.parameters
        kept_by_optimizer = 12.0 if plan.launch.engine == "deepspeed" else 8.0
        one = checkpoint_bytes(saved, plan.size.trainable, plan.setting.trainable_bytes, kept_by_optimizer)
    except ValueError as error:
        return f"No estimate: {error}. {free / GIB:.1f} GiB are free."
    limit = args.save_total_limit
    together = one * ((limit or 1) + 1) + saved * plan.setting.trainable_bytes  # one is being written; the final model
    kept = "all of them are kept (save_total_limit)" if not limit else f"{limit} are kept (save_total_limit)"
    if together > free:
        warn(
            f"output_dir has {free / GIB:.2f} GiB of free disk space, but {limit or 1} checkpoint(s), one that is "
            f"being written and the final model need about {together / GIB:.2f} GiB. Free some space, or choose "
            "another output_dir."
        )
    return f"A checkpoint takes about {one / GIB:.2f} GiB; {kept}. {free / GIB:.1f} GiB are free at {args.output_dir}."


def _colocated(plan: Plan, warn: Warn) -> list[Part]:
    """vLLM's share of a GPU that it shares with the training."""
    args = plan.args
    if not args.use_vllm or args.vllm_mode != "colocate":
        return []
    weights = plan.setting.compute * plan.size.parameters / args.vllm_tensor_parallel_size
    bytes_each = plan.setting.compute
    sequence = kv_cache(plan.size, 1, plan.length, bytes_each, bytes_each) / args.vllm_tensor_parallel_size
    phase: Phase = "generation" if args.vllm_enable_sleep_mode else "always"
    share = args.vllm_gpu_memory_utilization
    if plan.memory is None:
        return [Part("vLLM: weights and KV of one sequence", weights + sequence, phase)]
    if share * plan.memory < weights + sequence:
        warn(
            f"vLLM may use {share:g} of a GPU, {share * plan.memory / GIB:.1f} GiB, but its weights and the KV cache "
            f"of one sequence need {(weights + sequence) / GIB:.1f} GiB. Raise vllm_gpu_memory_utilization."
        )
    return [Part(f"vLLM: {share:g} of the GPU", share * plan.memory, phase)]


def server(plan: Plan, warn: Warn) -> str:
    """Which engine generates; for a server, whether it is up, serves this model and takes sequences of this length."""
    args, model = plan.args, str(plan.recipe.model.model_name_or_path)
    if not args.use_vllm:
        return "transformers generates the rollouts, in the training processes. vLLM is faster (use_vllm)."
    if args.vllm_mode == "colocate":
        share = args.vllm_gpu_memory_utilization
        return f"vLLM generates the rollouts, in the training processes, with {share:g} of each GPU's memory."
    need = _server_memory(plan)
    if plan.recipe.run.serve:
        return f"The training starts a vLLM server of its own on port {args.vllm_server_port}.{need}"
    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    try:
        client = Client(url)
        client.ask("/health")
        served = client.model()
    except (RolloutError, RequestRefused, ValueError) as error:
        warn(f"There is no vLLM server at {url} ({error}). Start it before the training: `basis-rl serve {model}`.")
        return f"vLLM generates the rollouts, at {url}, where no server answers at present.{need}"
    if not any(_same(model, name) for name in served.names):
        warn(f"The vLLM server at {url} serves {', '.join(served.names)}, but the recipe trains {model}.")
    if served.max_model_len is not None and served.max_model_len < plan.length:
        warn(
            f"The vLLM server at {url} accepts {served.max_model_len} tokens, but the longest prompt ({plan.prompt}) "
            f"and max_completion_length ({args.max_completion_length}) together have {plan.length}. Start it with "
            f"--max-model-len {plan.length} or more."
        )
    return (
        f"vLLM generates the rollouts, at {url}. The server is healthy, serves {' = '.join(served.names)} and accepts "
        f"up to {served.max_model_len} tokens; {plan.length} are needed.{need}"
    )


def _same(model: str, name: str) -> bool:
    folder, other = Path(model), Path(name)
    return model == name or (folder.exists() and other.exists() and folder.samefile(other))


def _server_memory(plan: Plan) -> str:
    try:
        bytes_each = plan.setting.compute
        cache = kv_cache(plan.size, 1, plan.length, bytes_each, bytes_each) / GIB
        weights = bytes_each * plan.size.parameters / GIB
    except ValueError:
        return ""
    return (
        f" It needs {weights:.1f} GiB for the weights, and {cache:.2f} GiB of KV cache for each sequence of "
        f"{plan.length} tokens."
    )


def extras(plan: Plan, warn: Warn) -> None:
    """Warn about packages that the training needs and that are not installed here; another machine may have them."""
    wanted = {"vllm": ("use_vllm", plan.args.use_vllm)}
    wanted["deepspeed"] = (str(plan.launch), plan.launch.engine == "deepspeed")
    for module, (what, needed) in wanted.items():
        if needed and (message := missing_extra(module, what)):
            warn(message)


def sandbox() -> str:
    """How this machine isolates the processes that grade rollouts (docs/security.md)."""
    return f"On this machine: {isolation()}."


def hub(args: BasisConfig, warn: Warn) -> str:
    """Whether the model can be pushed.

    Raises:
        ValueError: the token is missing or refused, the repository's name is invalid, or the token may not push to it.
    """
    if not args.push_to_hub:
        return "Nothing is pushed (push_to_hub)."
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    name = args.hub_model_id or Path(os.path.abspath(args.output_dir)).name
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"hub_model_id: '{name}' is not a valid name for a repository: {error}") from error
    try:
        account = HfApi(token=args.hub_token).whoami()
    except LocalTokenNotFoundError as error:
        raise ValueError("push_to_hub: there is no token. Run `hf auth login`, or set HF_TOKEN.") from error
    except Exception as error:  # whatever the network may do
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            raise ValueError(
                f"push_to_hub: the Hub refuses the token ({str(error)[:200]}). Run `hf auth login` again."
            ) from error
        warn(f"The Hub cannot be reached ({type(error).__name__}), so '{name}' was not checked for a push.")
        return f"The model will be pushed to '{name}'; whether that is possible was not checked."
    owners = [account["name"], *(org["name"] for org in account.get("orgs", []))]
    owner = name.split("/")[0] if "/" in name else account["name"]
    if owner not in owners:
        raise ValueError(
            f"hub_model_id: '{name}' belongs to '{owner}', but the token belongs to {account['name']}"
            f"{_member(owners[1:])}. Use one of these names, or another token."
        )
    return f"The model will be pushed to '{name if '/' in name else f'{owner}/{name}'}', as {account['name']}."


def _member(organisations: Sequence[str]) -> str:
    return f", member of {', '.join(organisations)}" if organisations else ""
