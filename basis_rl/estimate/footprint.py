"""From a model's configuration and a run's settings to the numbers that `basis_rl.estimate.memory` works with."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, training_args
from transformers.integrations import deepspeed
from trl import ModelConfig, get_peft_config

from basis_rl import resources
from basis_rl.estimate.memory import Engine, Launch, ModelSize, Scoring, Setting
from basis_rl.run.seams import attributes
from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.packing import Method, method_of

# Numbers kept for each trained one; the others' are not known here.
_OPTIMIZER_STATES = {"adamw_torch": 2.0, "adamw_torch_fused": 2.0, "sgd": 0.0, "rmsprop": 1.0, "adagrad": 1.0}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ENGINES: Mapping[str, Engine] = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp"}
_OFFLOADED = ("offload_optimizer", "offload_param")


def read_launch(path: str | None = None, world_size: int | None = None) -> Launch:
    """The launch that an accelerate configuration describes, or without one the environment's.

    Args:
        path: the file that would be given to ``accelerate launch --config_file``, or the name of one that comes with
            basis-rl (``zero3``).
        world_size: processes, in place of the file's.

    Raises:
        ValueError: the file cannot be read.
    """
    if path is None:
        launch = _launched()
    else:
        from accelerate.commands.config.config_args import load_config_from_file

        path = str(resources.accelerate_config(path))
        try:
            config = load_config_from_file(path)
            kind = getattr(config.distributed_type, "value", config.distributed_type)
            settings = {**(config.deepspeed_config or {}), **(config.fsdp_config or {})}
            launch = _from_settings(str(kind), int(config.num_processes), settings, path)
        except Exception as error:
            raise ValueError(f"--accelerate_config: '{path}' is not an accelerate configuration: {error}") from error
    if world_size is not None and world_size < 1:
        raise ValueError(f"--num_processes must be at least 1, got {world_size}.")
    return dataclasses.replace(launch, world=world_size or max(1, launch.world))


def _launched() -> Launch:
    environment = os.environ
    world = int(environment.get("WORLD_SIZE", "1"))
    kind = next((kind for kind in _ENGINES if environment.get(f"ACCELERATE_USE_{kind}") == "true"), "")
    keys = ("zero_stage", "offload_optimizer_device", "offload_param_device")
    given = {key: environment.get(f"ACCELERATE_DEEPSPEED_{key.upper()}") for key in keys}
    given["deepspeed_config_file"] = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    given["fsdp_offload_params"] = environment.get("FSDP_OFFLOAD_PARAMS")
    launched = world > 1 or kind == "DEEPSPEED"
    return _from_settings(kind, world, given, "accelerate launch" if launched else Launch.source)


def _from_settings(kind: str, world: int, settings: Mapping[str, Any], source: str) -> Launch:
    engine = _ENGINES.get(kind, "plain")
    if engine != "deepspeed":
        offload = engine == "fsdp" and str(settings.get("fsdp_offload_params")).lower() == "true"
        return Launch(world, engine, 0, offload, offload, source)
    if own := settings.get("deepspeed_config_file"):
        return _of_zero(world, json.loads(Path(own).read_text()).get("zero_optimization", {}), source)
    # Accelerate's default is ZeRO-2.
    stage = 2 if settings.get("zero_stage") is None else settings["zero_stage"]
    devices = {name: {"device": settings.get(f"{name}_device")} for name in _OFFLOADED}
    return _of_zero(world, {"stage": stage, **devices}, source)


def _of_zero(world: int, zero: Mapping[str, Any], source: str) -> Launch:
    """By ``zero_optimization`` of a configuration of DeepSpeed's own."""
    to_cpu = [(zero.get(name) or {}).get("device") not in (None, "none") for name in _OFFLOADED]
    return Launch(world, "deepspeed", int(zero.get("stage", 0)), to_cpu[0], to_cpu[1], source)


def asked(launch: Launch, args: BasisConfig) -> Launch:
    """The launch with the engine that the arguments themselves ask transformers for, if they do.

    A `deepspeed` goes before any launch, and before `fsdp`. That shards nothing on one process, and leaves offloading
    to the launch where it does not ask for it.
    """
    if args.deepspeed:
        # In the plugin accelerate has filled in "auto".
        plugin: Any = args.deepspeed_plugin
        return _of_zero(launch.world, plugin.deepspeed_config["zero_optimization"], "deepspeed of the recipe")
    if args.fsdp and launch.engine != "deepspeed" and launch.world > 1:
        offload = args.fsdp_plugin_args.get("cpu_offload", launch.offload_parameters)
        return Launch(launch.world, "fsdp", 0, offload, offload, "fsdp of the recipe")
    return launch


@contextmanager
def planned(launch: Launch) -> Iterator[None]:
    """Within it, a `BasisConfig` is what the processes of `launch` would see, whatever this machine is.

    Batch arithmetic depends on the number of processes, and transformers refuses bf16 where there is no GPU. By ZeRO-3
    of a recipe it would divide every model among processes that are not there.
    """
    world = attributes(BasisConfig, world_size=property(lambda self: launch.world))
    whole = attributes(deepspeed, set_hf_deepspeed_config=lambda config: None)
    with world, whole, attributes(training_args, is_torch_bf16_gpu_available=lambda: True):
        yield


def _built(config: Any, trust_remote_code: bool) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)


def scoring_method(config: Any, args: BasisConfig, attention: str | None) -> Method:
    """How the trainer will score rows of this model with that attention; None is the model's own."""
    built = _built(config, args.trust_remote_code)
    if attention is not None:
        # Set here, since a kernel may be missing on this machine.
        built.config.get_text_config()._attn_implementation = attention
    return method_of(built, args)


def model_size(config: Any, model: ModelConfig, *, trust_remote_code: bool = False) -> ModelSize:
    """Exact counts of the parameters, from the model built without memory (on the meta device), adapters included.

    Raises:
        ValueError: no decoder-only language model of the kind that the formulas are for.
    """
    built = _built(config, trust_remote_code)
    peft_config = get_peft_config(model)
    if peft_config is not None:
        from peft import get_peft_model

        built = get_peft_model(built, peft_config)
    parameters = dict(built.named_parameters())
    trained = [p for p in parameters.values() if p.requires_grad]
    text = config.get_text_config()
    try:
        heads = int(text.num_attention_heads)
        head = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        size = ModelSize(
            parameters=sum(p.numel() for p in parameters.values()),
            trainable=sum(p.numel() for p in trained),
            trainable_tensors=len(trained),
            layer_matrices=sum(p.numel() for name, p in parameters.items() if ".layers." in name and p.ndim == 2),
            layers=int(text.num_hidden_layers),
            hidden=int(text.hidden_size),
            intermediate=int(text.intermediate_size),
            query=heads * head,
            key_value=int(getattr(text, "num_key_value_heads", None) or heads) * head,
            heads=heads,
            vocabulary=int(text.vocab_size),
            qk_norm=any("q_norm" in name for name in parameters),
        )
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the configuration of a '{config.model_type}' does not say its shape ({error})") from error
    if size.layer_matrices == 0 or hasattr(text, "num_experts") or hasattr(text, "num_local_experts"):
        raise ValueError(f"the formulas are for dense decoders with gated MLPs, not for a '{config.model_type}'")
    return size


def setting_of(args: BasisConfig, model: ModelConfig, config: Any, launch: Launch, prompt: int) -> Setting:
    """What the memory depends on besides the model's size.

    Args:
        args: the run's.
        model: its model settings.
        config: the model's configuration.
        launch: how it would be started.
        prompt: length of the longest prompt, in tokens.
    """
    dtype = model.dtype if model.dtype in _BYTES else str(getattr(config, "dtype", None) or "float32")
    loaded = _BYTES.get(dtype.removeprefix("torch."), 4)
    lora = bool(model.use_peft)
    attention = model.attn_implementation or "sdpa"
    method = scoring_method(config, args, model.attn_implementation)
    scoring: Scoring = "padded" if not method.packed else "shared" if method.shared else "packed"
    rows: float = args.per_device_train_batch_size
    if budget := args.per_device_token_budget:
        # As many of the longest rows, but never less than one, nor more than a step has.
        rows = min(rows * args.gradient_accumulation_steps, max(1, budget / (prompt + args.max_completion_length)))
    return Setting(
        **dataclasses.asdict(launch),
        low=2 if args.bf16 or args.fp16 else 0,
        frozen_bytes=loaded,
        trainable_bytes=4 if lora else loaded,
        optimizer_states=_OPTIMIZER_STATES.get(str(getattr(args.optim, "value", args.optim))),
        rows=rows,
        budgeted=bool(budget),
        prompt=prompt,
        completion=args.max_completion_length,
        checkpointing=args.gradient_checkpointing,
        attention=attention,
        accumulation=args.gradient_accumulation_steps,
        reference=args.beta != 0 and not lora,
        head_fp32=args.cast_lm_head_to_fp32,
        generated=0 if args.use_vllm else args.generation_batch_size // launch.world,
        gather_to_generate=args.ds3_gather_for_generation,
        scoring=scoring,
        cpu=args.use_cpu,
        compact_head=args.use_cpu and method.trimmed,
    )
