"""The options of ``basis-rl eval``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from basis_rl.data import DataArguments
from basis_rl.names import check_word, option

MOST_NEW_TOKENS = 32_768


@dataclass
class EvalArguments(DataArguments):
    """Which model is asked what, and how; your own data by the keys of a recipe.

    Raises:
        ValueError: options that contradict each other, or out of their range.
    """

    model: str = option("", "The model: a Hub id or a folder. It may be given without the flag.")
    benchmarks: list[str] = option(None, "Names, files, or NAME=SOURCE, separated by commas or spaces.", factory=list)
    output_dir: str | None = option(None, "The folder for rollouts and results. The default is runs/eval/MODEL.")
    compare: str | None = option(None, "The folder of another evaluation, for a paired comparison with p-values.")
    backend: str = option("transformers", "transformers (in this process) or vllm.")
    vllm_urls: list[str] | None = option(None, "The URLs of running servers. By default one is started, and stopped.")
    vllm_args: str = option("", "Further arguments of vLLM for the server that is started.")
    request_timeout: float | None = option(None, "Seconds for all rollouts of a problem. By default by their length.")
    num_rollouts: int | None = option(None, "The number of rollouts per problem. The default is the benchmark's.")
    temperature: float | None = option(None, "The default is that of the benchmark. 0 is greedy.")
    top_p: float | None = option(None, "The default is that of the benchmark, and 1 where temperature is given.")
    top_k: int = option(0, "The number of most likely tokens to sample from. 0 turns it off.")
    min_p: float | None = option(None, "The least probability of a token, relative to the most likely one.")
    repetition_penalty: float = option(1.0, "The penalty for repeated tokens. 1 turns it off.")
    max_new_tokens: int | None = option(None, f"The default is what the context leaves, and at most {MOST_NEW_TOKENS}.")
    recipe: str | None = option(
        None,
        "A recipe, the folder of a run, or none: its prompts, columns, rewards and completion length hold where no "
        "option says otherwise, and without benchmarks or dataset_name its problems. The default is the run of MODEL.",
    )
    reward_funcs: list[str] = option(
        None,
        "As in a recipe. The first one that judges more than form and length grades; a full score is right.",
        factory=lambda: ["math_verify"],
    )
    reward_kwargs: dict[str, Any] | str = option(None, "As in a recipe, such as '{column: test_list}'.", factory=dict)
    answer_in: str = option(
        "auto",
        "Where the answer of a rollout is: box, tag, hashes, last_line, last_number or anywhere. `auto` is a box, or "
        "anywhere if no prompt asks for one.",
    )
    chat_template: str | None = option(None, "As in a recipe, for a model that has not been trained with it yet.")
    chat_template_kwargs: str = option("{}", "For the chat template, as JSON: '{\"enable_thinking\": false}'.")
    limit: int | None = option(None, "The number of problems that are used of each benchmark, from its start.")
    on_invalid_gold: str = option("error", "What to do with problems whose gold cannot be right: 'error' or 'drop'.")
    dtype: str = option("auto", "The precision of the weights; auto is that of the checkpoint.")
    batch_size: int = option(64, "With the backend transformers: the number of rollouts that are generated at a time.")
    num_workers: int | None = option(None, "The number of processes that grade. The default is the cores, at least 2.")
    seed: int = option(0, "The seed of the sampling.")
    revision: str | None = option(None, "The revision of the model on the Hub.")
    trust_remote_code: bool = option(False, "Runs code that comes with the model.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ValueError("Which model? `basis-rl eval MODEL --benchmarks math500`: a Hub id or a folder.")
        if bool(self.benchmarks) == bool(self.dataset_name):
            raise ValueError("Which benchmarks? `--benchmarks aime24,math500`, or the path of a file; or in place of "
                             "benchmarks your own data, `--dataset_name`.")  # fmt: skip
        check_word("backend", self.backend, ("transformers", "vllm"))
        check_word("on_invalid_gold", self.on_invalid_gold, ("error", "drop"))
        if self.on_invalid_gold == "drop":
            self.on_missing_gold = "drop"
        if self.vllm_urls and self.backend != "vllm":
            raise ValueError("vllm_urls needs --backend vllm.")
        for name in ("num_rollouts", "max_new_tokens", "limit", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}.")
        try:
            self.template_kwargs: dict[str, Any] = dict(json.loads(self.chat_template_kwargs))
        except (ValueError, TypeError) as error:
            raise ValueError(f"chat_template_kwargs must be a JSON object: {error}.") from error

    @property
    def folder(self) -> Path:
        """Where rollouts and results go."""
        return Path(self.output_dir or f"runs/eval/{Path(self.model).name}")
