"""What an evaluation may be told: the options of ``basis-rl eval``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from basis_rl.data import DataArguments

MOST_NEW_TOKENS = 32_768


@dataclass
class EvalArguments:
    """Which model is asked what, and how.

    Raises:
        ValueError: options that contradict each other, or out of their range.
    """

    model: str = field(default="", metadata={"help": "Hub id or folder; may be given without the flag."})
    benchmarks: list[str] = field(
        default_factory=list,
        metadata={"help": "Names, paths of files, or NAME=SOURCE; separated by commas or spaces."},
    )
    output: str | None = field(
        default=None, metadata={"help": "Folder for rollouts and results; default: runs/eval/MODEL."}
    )
    compare: str | None = field(
        default=None, metadata={"help": "Folder of another evaluation: paired comparison with it, with p-values."}
    )
    backend: str = field(default="transformers", metadata={"help": "transformers (this process) or vllm."})
    vllm_urls: str | None = field(
        default=None, metadata={"help": "Servers that run already, by commas; default: one is started, and stopped."}
    )
    vllm_args: str = field(default="", metadata={"help": "Further arguments of vLLM for the server that is started."})
    request_timeout: float | None = field(
        default=None,
        metadata={"help": "Seconds that vLLM may take for all rollouts of a problem; default: by their length."},
    )
    num_rollouts: int | None = field(
        default=None, metadata={"help": "Rollouts per problem; default: that of the benchmark, 32 or 1."}
    )
    temperature: float | None = field(default=None, metadata={"help": "Default: that of the benchmark. 0 is greedy."})
    top_p: float | None = field(
        default=None, metadata={"help": "Default: that of the benchmark; 1 where temperature is given."}
    )
    top_k: int = field(default=0, metadata={"help": "0: off."})
    min_p: float | None = field(default=None, metadata={"help": "Default: off."})
    repetition_penalty: float = field(default=1.0, metadata={"help": "1: off."})
    max_new_tokens: int | None = field(
        default=None, metadata={"help": f"Default: what the context leaves, at most {MOST_NEW_TOKENS}."}
    )
    prompt_template: str = field(
        default=DataArguments.prompt_template,
        metadata={"help": "What the model is asked; `{prompt}` stands for the problem."},
    )
    system_prompt: str | None = field(default=None, metadata={"help": "System message of the conversation."})
    chat_template_kwargs: str = field(
        default="{}", metadata={"help": "Of the chat template, as JSON: '{\"enable_thinking\": false}'."}
    )
    limit: int | None = field(default=None, metadata={"help": "Only the first so many problems of each benchmark."})
    on_invalid_gold: str = field(
        default="error", metadata={"help": "Problems whose gold cannot be right: 'error' or 'drop'."}
    )
    dtype: str = field(default="auto", metadata={"help": "Of the weights; auto is the checkpoint's own."})
    batch_size: int = field(default=64, metadata={"help": "transformers: completions generated at a time."})
    num_workers: int = field(default=2, metadata={"help": "Processes that grade."})
    seed: int = field(default=0, metadata={"help": "Of the sampling."})
    revision: str | None = field(default=None, metadata={"help": "Of the model on the Hub."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("Which model? `basis-rl eval MODEL --benchmarks math500`: a Hub id or a folder.")
        self.benchmarks = [name for word in self.benchmarks for name in word.split(",") if name]
        if not self.benchmarks:
            raise ValueError("Which benchmarks? `--benchmarks aime24,math500`, or the path of a file.")
        if self.backend not in ("transformers", "vllm"):
            raise ValueError(f"backend must be transformers or vllm, got '{self.backend}'.")
        if self.on_invalid_gold not in ("error", "drop"):
            raise ValueError(f"on_invalid_gold must be 'error' or 'drop', got '{self.on_invalid_gold}'.")
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
        return Path(self.output or f"runs/eval/{Path(self.model).name}")

    @property
    def urls(self) -> list[str]:
        """Servers that run already."""
        return [url for url in (self.vllm_urls or "").split(",") if url]

    @property
    def data(self) -> DataArguments:
        """How problems are put to the model."""
        return DataArguments(
            prompt_template=self.prompt_template,
            system_prompt=self.system_prompt,
            on_missing_gold=self.on_invalid_gold,
        )
