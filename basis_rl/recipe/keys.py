"""The keys of a recipe beside those of data, model and trainer, and what a parsed recipe is."""

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

# Keys whose values are mappings, which argparse does not know.
DICT_KEYS = ("baseline_kwargs", "reward_kwargs", "dataset_kwargs", "tool_kwargs", "prompt_sampler_kwargs")


@dataclass
class RunArguments:
    """What is trained with which estimator and reward, and how a value table is built."""

    baseline: str = option("grpo", "Name of the baseline, or module:Class.")
    baseline_kwargs: dict[str, Any] | None = option(None, "Its parameters (JSON).")
    objective: str | None = option(None, "Name of the policy objective, or module:function; default: loss_type.")
    prompt_sampler: str = option(
        "uniform", f"Which prompts are sampled: {', '.join(SAMPLERS)}, or module:Class of your own."
    )
    prompt_sampler_kwargs: dict[str, Any] | None = option(None, "Its parameters (JSON): `{correct: true}`.")
    reward_funcs: list[str] = option(
        None,
        f"Any of {', '.join(REWARDS)}; a function of your own in TRL's form (`my_lib.rewards.mine`), or in "
        "the killable pool, one completion a call (`pool:my_lib.rewards:mine`). Weights: reward_weights.",
        factory=lambda: ["math_verify"],
    )
    reward_kwargs: dict[str, Any] | None = option(
        None,
        "Their parameters (JSON): `{format: {form: box}, overlong: {cache: 4096}}`; of a single one "
        "also `{timeout: 5}`.",
    )
    tools: list[str] | None = option(
        None, "Tools that the model may call: `python`, `calculator`, or the dotted path of a function."
    )
    tool_kwargs: dict[str, Any] | None = option(None, "Their parameters, by tool: `{python: {timeout: 5}}` (JSON).")
    serve: bool = option(False, "`basis-rl train`: start a vLLM server beside the training, and stop it at the end.")
    serve_devices: str | None = option(None, "CUDA_VISIBLE_DEVICES of that server, which the training must not use.")
    serve_args: str | None = option(
        None, "Further arguments of vLLM for it; on the command line: --serve_args='--a 1 --b 2'."
    )
    eval_benchmarks: list[str] | None = option(
        None,
        "With eval_strategy: benchmarks, files or NAME=SOURCE that training is measured on, with "
        "num_generations_eval answers to each problem; default: the problems that test_fraction holds out.",
    )
    max_eval_samples: int | None = option(None, "Only the first so many problems of each of eval_benchmarks.")
    values_num_rollouts: int = option(32, "`basis-rl values`: rollouts per prompt.")
    values_batch_size: int = option(256, "`basis-rl values`: rollouts generated at a time.")
    values_output: str | None = option(None, "`basis-rl values`: where to write; default: `values` of baseline_kwargs.")
    values_servers: str | None = option(
        None, "`basis-rl values`: URLs of vLLM servers to sample from, with commas between them."
    )
    values_serve: bool = option(False, "`basis-rl values`: start a vLLM server (serve_devices, serve_args) for it.")
    values_shard: str | None = option(
        None, "`basis-rl values`: `i/n`: do part i (from 0) of n; the last to finish merges all parts."
    )
    values_early_exit: int = option(
        0,
        "`basis-rl values`: rollouts after which prompts with rewards all 0 or all 1 are done; 0: never. "
        "It biases their values; see basis_rl.values.build.TablePlan.",
    )
    values_push_to_hub: str | None = option(
        None, "`basis-rl values`: dataset repository to push the table to, `owner/name`."
    )
    clusters_encoder: str = option(
        DEFAULT_ENCODER, "`basis-rl clusters`: a sentence-transformers model, Hub id or folder."
    )
    clusters_num: int | None = option(
        None, "`basis-rl clusters`: K; default: generation_batch_size / 16, at most prompts / 25."
    )
    clusters_output: str | None = option(
        None, "`basis-rl clusters`: where to write; default: `clusters` of baseline_kwargs."
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
