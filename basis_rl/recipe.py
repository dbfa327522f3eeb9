"""A recipe (YAML and command-line overrides) made into objects."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from basis_rl.baselines.registry import did_you_mean
from basis_rl.clusters.codebook import DEFAULT_ENCODER
from basis_rl.data import GYM_COLUMN, DataArguments, load_prompts
from basis_rl.evaluation.benchmarks import load_benchmark
from basis_rl.recipe_file import DICT_KEYS, read, split_path, take_dictionaries
from basis_rl.recipe_objects import build_recipe_baseline, build_rewards, build_tools
from basis_rl.hub.redact import redact
from basis_rl.rewards.registry import REWARDS
from basis_rl.rollout.server import ServerOptions
from basis_rl.trainer import BasisConfig, BasisTrainer


@dataclass
class RunArguments:
    """What is trained with which estimator and reward, and how a value table is built."""

    baseline: str = field(default="grpo", metadata={"help": "Name of the baseline, or module:Class."})
    baseline_kwargs: dict[str, Any] | None = field(default=None, metadata={"help": "Its parameters (JSON)."})
    objective: str | None = field(default=None, metadata={"help": "Name of the policy objective; default: loss_type."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["math_verify"],
        metadata={
            "help": f"Any of {', '.join(REWARDS)}; a function of your own in TRL's form (`my_lib.rewards.mine`), or in "
            "the killable pool, one completion a call (`pool:my_lib.rewards:mine`). Weights: reward_weights."
        },
    )
    reward_kwargs: dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": "Their parameters (JSON): `{format: {form: box}, overlong: {cache: 4096}}`; of a single one "
            "also `{timeout: 5}`."
        },
    )
    tools: list[str] | None = field(
        default=None,
        metadata={"help": "Tools that the model may call: `python`, `calculator`, or the dotted path of a function."},
    )
    tool_kwargs: dict[str, Any] | None = field(
        default=None, metadata={"help": "Their parameters, by tool: `{python: {timeout: 5}}` (JSON)."}
    )
    serve: bool = field(
        default=False,
        metadata={"help": "`basis-rl train`: start a vLLM server beside the training, and stop it at the end."},
    )
    serve_devices: str | None = field(
        default=None, metadata={"help": "CUDA_VISIBLE_DEVICES of that server, which the training must not use."}
    )
    serve_args: str | None = field(
        default=None,
        metadata={"help": "Further arguments of vLLM for it; on the command line: --serve_args='--a 1 --b 2'."},
    )
    eval_benchmarks: list[str] | None = field(
        default=None,
        metadata={
            "help": "With eval_strategy: benchmarks, files or NAME=SOURCE that training is measured on, with "
            "num_generations_eval answers to each problem; default: the problems that test_fraction holds out."
        },
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Only the first so many problems of each of eval_benchmarks."}
    )
    values_num_rollouts: int = field(default=32, metadata={"help": "`basis-rl values`: rollouts a prompt."})
    values_batch_size: int = field(default=256, metadata={"help": "`basis-rl values`: rollouts generated at a time."})
    values_output: str | None = field(
        default=None, metadata={"help": "`basis-rl values`: where to write; default: `values` of baseline_kwargs."}
    )
    values_servers: str | None = field(
        default=None,
        metadata={"help": "`basis-rl values`: URLs of vLLM servers to sample from, with commas between them."},
    )
    values_serve: bool = field(
        default=False, metadata={"help": "`basis-rl values`: start a vLLM server (serve_devices, serve_args) for it."}
    )
    values_shard: str | None = field(
        default=None,
        metadata={"help": "`basis-rl values`: `i/n`: do part i (from 0) of n; the last to finish merges all parts."},
    )
    values_early_exit: int = field(
        default=0,
        metadata={
            "help": "`basis-rl values`: rollouts after which prompts with rewards all 0 or all 1 are done; 0: never. "
            "It biases their values; see basis_rl.values.build.TablePlan."
        },
    )
    values_push_to_hub: str | None = field(
        default=None, metadata={"help": "`basis-rl values`: dataset repository to push the table to, `owner/name`."}
    )
    clusters_encoder: str = field(
        default=DEFAULT_ENCODER,
        metadata={"help": "`basis-rl clusters`: a sentence-transformers model, Hub id or folder."},
    )
    clusters_num: int | None = field(
        default=None,
        metadata={"help": "`basis-rl clusters`: K; default: generation_batch_size / 16, at most prompts / 25."},
    )
    clusters_output: str | None = field(
        default=None, metadata={"help": "`basis-rl clusters`: where to write; default: `clusters` of baseline_kwargs."}
    )


@dataclass
class Recipe:
    """A parsed recipe; `resolved` is every key that was given, after overrides and without secrets."""

    run: RunArguments
    data: DataArguments
    model: ModelConfig
    args: BasisConfig
    resolved: dict[str, Any]
    argv: list[str] = field(default_factory=list)


class _Parser(TrlParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser() -> TrlParser:
    """The parser of all keys that a recipe or the command line may hold."""
    types = (RunArguments, DataArguments, ModelConfig, BasisConfig)
    return _Parser(types, prog="basis-rl", allow_abbrev=False)


def parse_recipe(argv: Sequence[str]) -> Recipe:
    """A recipe from ``[RECIPE.yaml] [--config RECIPE.yaml] [--key value ...]``; the command line wins.

    ``--baseline_kwargs.weighting vop`` changes one entry of a dictionary; an ``env`` mapping in the file sets
    environment variables, as in TRL.

    Raises:
        ValueError: no such file, unknown key ("did you mean"), value of a wrong type, settings that contradict.
    """
    keys = parser()
    flags = {flag for action in keys._actions for flag in action.option_strings}
    path, rest = split_path(list(argv))
    config = read(path) if path else {}
    for name, value in (config.pop("env", None) or {}).items():
        os.environ[name] = str(value)
    known = {action.dest for action in keys._actions} - {"help"}
    for key in config:
        if key not in known:
            raise ValueError(f"Unknown key '{key}' in {path}.{did_you_mean(key, known)}")
    arguments = take_dictionaries(rest, config)
    for token in arguments:
        flag = token.split("=")[0]
        if flag.startswith("--") and flag not in flags:
            raise ValueError(f"Unknown option '{flag}'.{did_you_mean(flag, flags)}")
    keys.set_defaults_with_config(**{k: v for k, v in config.items() if k not in DICT_KEYS})
    run, data, model, args = keys.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    for key in DICT_KEYS:
        if not isinstance(config.get(key) or {}, dict):
            raise ValueError(f"{key} must be a mapping (`{key}: {{name: value}}`), got {config[key]!r}.")
        setattr(data if key == "dataset_kwargs" else run, key, config.get(key) or {})
    if isinstance(run.reward_funcs, str):
        run.reward_funcs = [run.reward_funcs]
    if isinstance(run.tools, str):
        run.tools = [run.tools]
    if run.eval_benchmarks:
        words = [run.eval_benchmarks] if isinstance(run.eval_benchmarks, str) else run.eval_benchmarks
        run.eval_benchmarks = [name for word in words for name in word.split(",") if name]
    if not model.model_name_or_path:
        raise ValueError("model_name_or_path is missing: a Hub id or the path of a model.")
    parsed = {**vars(args), **vars(model), **vars(data), **vars(run)}
    given = [token.removeprefix("--").split("=")[0].replace("-", "_") for token in arguments if token.startswith("--")]
    resolved = {**config, **{key: parsed[key] for key in given if key in parsed}}
    resolved = {key: value.value if isinstance(value, Enum) else value for key, value in resolved.items()}
    resolved = redact(resolved)  # it is saved and pushed
    return Recipe(run=run, data=data, model=model, args=args, resolved=resolved, argv=list(argv))


def load_config_and_tokenizer(model: ModelConfig, args: BasisConfig) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model's configuration and its tokenizer, without its weights.

    Raises:
        ValueError: they cannot be loaded.
    """
    return load_parts(str(model.model_name_or_path), model.model_revision, args.trust_remote_code)


def load_parts(name: str, revision: str | None, trust_remote_code: bool) -> tuple[Any, PreTrainedTokenizerBase]:
    """`load_config_and_tokenizer` of a model that no recipe names."""
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(name, **options)
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", truncation_side="left", **options)
    except (OSError, ValueError) as error:
        where = "" if Path(name).is_dir() else " (there is no such folder; taken for a Hub id)"
        raise ValueError(f"model_name_or_path: '{name}' could not be loaded{where}: {str(error)[:300]}") from error
    weights = [*Path(name).glob("*.safetensors"), *Path(name).glob("*.bin")]
    if Path(name).is_dir() and not weights:
        raise ValueError(f"model_name_or_path: the folder '{name}' holds no weights (*.safetensors, *.bin).")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return config, tokenizer


def load_training_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, held_out: bool = False) -> Dataset:
    """The recipe's problems, as messages if the tokenizer has a chat template."""
    data, column = recipe.data, recipe.args.difficulty_column
    if column is not None and column not in (data.keep_columns or []):
        data = replace(data, keep_columns=[*(data.keep_columns or []), column])
    chat = tokenizer.chat_template is not None
    scored = [GYM_COLUMN] if "reasoning_gym" in recipe.run.reward_funcs else []
    return load_prompts(data, conversational=chat, held_out=held_out, optional_columns=scored)


def load_eval_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Dataset | dict[str, Dataset] | None:
    """What training is measured on: the recipe's benchmarks, the held-out problems (with benchmarks: ``held_out``).

    Raises:
        ValueError: there are benchmarks but no ``eval_strategy``, or neither benchmarks nor held-out problems.
    """
    run = recipe.run
    if recipe.args.eval_strategy == "no":
        if run.eval_benchmarks:
            raise ValueError("eval_benchmarks needs eval_strategy: steps (and eval_steps), or epoch.")
        return None
    if not run.eval_benchmarks:
        return load_training_data(recipe, tokenizer, held_out=True)
    chat = tokenizer.chat_template is not None
    sets = {}
    for item in run.eval_benchmarks:
        problems = load_benchmark(item, recipe.data, conversational=chat, limit=run.max_eval_samples)
        sets[problems.name] = problems.dataset.select_columns(["prompt", "solution", "prompt_id"])
    if recipe.data.test_fraction > 0:
        sets["held_out"] = load_training_data(recipe, tokenizer, held_out=True)
    return sets


def _warn_of_overlap(dataset: Dataset, evaluated: Dataset | dict[str, Dataset] | None) -> None:
    trained = set(dataset["prompt_id"])
    for name, problems in (evaluated if isinstance(evaluated, dict) else {}).items():
        common = len(trained & set(problems["prompt_id"]))
        if common:
            logging.getLogger(__name__).warning("%d problems of '%s' are among the training problems.", common, name)


def model_init_kwargs(recipe: Recipe) -> dict[str, Any]:
    """What the model is loaded with."""
    given = {
        "revision": recipe.model.model_revision,
        "attn_implementation": recipe.model.attn_implementation,
        "dtype": recipe.model.dtype,
    }
    extra = recipe.args.model_init_kwargs
    return {**given, **(json.loads(extra) if isinstance(extra, str) else extra or {})}


def server_options(recipe: Recipe, port: int, log: Path) -> ServerOptions:
    """The vLLM server of a recipe that starts one itself, in the precision that the training generates in."""
    run, args = recipe.run, recipe.args
    return ServerOptions(
        model=str(recipe.model.model_name_or_path),
        port=port,
        dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else recipe.model.dtype or "float32",
        max_model_len=args.vllm_max_model_length,
        log=log,
        devices=run.serve_devices,
        extra=shlex.split(run.serve_args or ""),
        revision=None if recipe.model.model_revision == "main" else recipe.model.model_revision,
    )


def build_trainer(recipe: Recipe) -> BasisTrainer:
    """Everything that a run needs, checked; cheap checks first.

    Raises:
        ValueError: see `parse_recipe`, `BasisTrainer` and the loaders.
    """
    baseline = build_recipe_baseline(recipe.run)
    rewards = build_rewards(recipe)
    tools = build_tools(recipe.run)
    _, tokenizer = load_config_and_tokenizer(recipe.model, recipe.args)
    dataset = load_training_data(recipe, tokenizer)
    evaluated = load_eval_data(recipe, tokenizer)
    _warn_of_overlap(dataset, evaluated)
    recipe.args.model_init_kwargs = model_init_kwargs(recipe)
    return BasisTrainer(
        model=recipe.model.model_name_or_path,
        reward_funcs=rewards,
        args=recipe.args,
        train_dataset=dataset,
        eval_dataset=evaluated,
        processing_class=tokenizer,
        baseline=baseline,
        objective=recipe.run.objective,
        tools=tools,
        peft_config=get_peft_config(recipe.model),
        quantization_config=get_quantization_config(recipe.model),
    )
