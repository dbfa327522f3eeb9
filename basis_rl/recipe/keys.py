"""The keys of a recipe other than those of data, model and trainer; and the parsed recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl import ModelConfig

from basis_rl.clusters.codebook import DEFAULT_ENCODER
from basis_rl.data import DataArguments
from basis_rl.names import option
from basis_rl.rewards.registry import REWARDS
from basis_rl.samplers import SAMPLERS
from basis_rl.trainer import BasisConfig


@dataclass
class RunArguments:
    """What is trained with which estimator and reward, and how a value table is built."""

    baseline: str = option("grpo", "The name of the baseline, or module:Class for one of your own.")
    baseline_kwargs: dict[str, Any] | None = option(None, "The parameters of the baseline, as a mapping.")
    objective: str | None = option(None, "The name of the policy objective, or module:function. By default loss_type.")
    prompt_sampler: str = option(
        "uniform", f"How prompts are chosen: {', '.join(SAMPLERS)}, or module:Class for a sampler of your own."
    )
    prompt_sampler_kwargs: dict[str, Any] | None = option(None, "The prompt sampler's parameters: {correct: true}.")
    reward_funcs: list[str] = option(
        None,
        f"The reward functions: any of {', '.join(REWARDS)}; a function of your own in TRL's form "
        "(my_lib.rewards:mine); or one that scores one rollout per call, in processes with limits of time and memory "
        "(pool:my_lib.rewards:mine). reward_weights holds their weights.",
        factory=lambda: ["math_verify"],
    )
    reward_kwargs: dict[str, Any] | None = option(
        None,
        "The parameters of the reward functions, as a mapping by their names: {format: {form: box}, overlong: {cache: "
        "4096}}. With a single reward function its parameters may stand alone: {timeout: 5}.",
    )
    tools: list[str] | None = option(None, "The tools that the model may call: python, calculator, your module:name.")
    tool_kwargs: dict[str, Any] | None = option(None, "The parameters of the tools by name: {python: {timeout: 5}}.")
    environment: dict[str, str] | str | None = option(
        None,
        "What the model acts in, as TRL's environment_factory: your module:Class, or a mapping of several, whose names "
        "the rows have in a column `environment`. Without dataset_name the rows are numbers in a column `seed`.",
    )
    environment_kwargs: dict[str, Any] | None = option(
        None, "The parameters of the environment; of several by their names: {game: {size: 4}}."
    )
    chat_template: str | None = option(
        None,
        "A file with a Jinja template in place of the tokenizer's. `tools` is one with calls of tools, for models with "
        "the tokens <|im_start|> and <|im_end|> whose own has none.",
    )
    serve: bool = option(
        False,
        "For `basis-rl train`: starts a vLLM server beside the training, generates with it (use_vllm, vllm_mode "
        "server), and stops it at the end.",
    )
    serve_devices: str | None = option(None, "The CUDA_VISIBLE_DEVICES of that server. The training must use others.")
    serve_args: str | None = option(None, "Further arguments of vLLM for that server: --serve_args='--a 1 --b 2'.")
    eval_benchmarks: list[str] | None = option(
        None,
        "With eval_strategy: the benchmarks, files or NAME=SOURCE that training is measured on, with "
        "num_generations_eval rollouts per problem. The default is the problems that test_fraction holds out.",
    )
    max_eval_samples: int | None = option(
        None, "The number of problems that are used of each of eval_benchmarks or dataset_test_split, from its start."
    )
    values_num_rollouts: int = option(32, "The number of rollouts per prompt.")
    values_batch_size: int = option(256, "The number of rollouts that are generated at a time.")
    values_output_dir: str | None = option(
        None, "The folder of the value table. The default is baseline_kwargs.values, or output_dir and `-values`."
    )
    values_servers: list[str] | None = option(None, "The URLs of vLLM servers to sample from.")
    values_serve: bool = option(False, "Starts a vLLM server for the table (see serve_devices and serve_args).")
    values_shard: str | None = option(None, "`i/n` samples part i (from 0) of n. The last process merges all parts.")
    values_early_exit: int = option(
        0,
        "A prompt is done after this many rollouts if their rewards are all 0 or all 1. 0 means "
        "never. It biases the values of these prompts; see basis_rl.values.build.TablePlan.",
    )
    values_push_to_hub: str | None = option(None, "The dataset repository to push the table to, `owner/name`.")
    clusters_encoder: str = option(DEFAULT_ENCODER, "A sentence-transformers model, as a Hub id or a folder.")
    clusters_num: int | None = option(
        None, "The number of clusters. The default is generation_batch_size / 16, at most the number of prompts / 25."
    )
    clusters_output_dir: str | None = option(None, "The folder of the codebook. By default baseline_kwargs.clusters.")


@dataclass
class Recipe:
    """A parsed recipe.

    `resolved` holds every key that was given, after overrides and without secrets; `notes` says in sentences what was
    translated from a ``trl grpo`` recipe.
    """

    run: RunArguments
    data: DataArguments
    model: ModelConfig
    args: BasisConfig
    resolved: dict[str, Any]
    argv: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
