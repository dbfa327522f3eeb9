"""Sampling with transformers, in this process: for value tables and evaluations of models that fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from basis_rl.engine.prefill import sharing
from basis_rl.run.seams import attributes

# Public fields of vLLM's `SamplingParams`, copied because to import vLLM takes half a minute: those that change the
# distribution of tokens, besides the temperature, and all of them.
VLLM_DRAWING = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "top_k", "min_p", "min_tokens",
    "structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "extra_args", "thinking_token_budget",
    "trace_decode_token_ids",
)  # fmt: skip
VLLM_SAMPLING = (
    *VLLM_DRAWING, "n", "temperature", "watermarking", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens",
    "logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone",
    "output_text_buffer_length", "skip_reading_prefix_cache", "repetition_detection", "routed_experts_prompt_start",
)  # fmt: skip


class Completion(NamedTuple):
    """One completion: its text without special tokens, and its token ids up to the end token, included.

    `truncated`: the length limit cut it off.
    """

    text: str
    token_ids: list[int]
    truncated: bool = False


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn: the fields of TRL's configuration, with its defaults. Temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    generation_kwargs: dict[str, Any] = field(default_factory=dict)

    def generation_config(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
        """The configuration, with every setting stated: `generate` fills in what is left out from the checkpoint,
        penalties included."""
        ends = end_tokens(model.generation_config, tokenizer)
        greedy = self.temperature == 0
        settings: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": not greedy,
            "temperature": None if greedy else self.temperature,
            "top_p": None if greedy else self.top_p,
            "top_k": None if greedy else self.top_k,
            "min_p": None if greedy else self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": ends,
            "disable_compile": True,
        }
        return GenerationConfig(**{**settings, **self.generation_kwargs})


def end_tokens(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a completion, in order: the tokenizer's end token and those that the checkpoint declares."""
    return sorted({tokenizer.eos_token_id, *declared_ends(config)} - {None})


def declared_ends(config: GenerationConfig | None) -> list[int]:
    """Ids at which `generate` ends a completion by this configuration, in its order."""
    declared = config.eos_token_id if config is not None else None
    return [] if declared is None else [declared] if isinstance(declared, int) else list(declared)


class StopStrings(StopStringCriteria):
    """Ends rows at strings, and records after how many tokens, because `generate` fills ended rows up with tokens that
    are not output.

    Attributes:
        lengths: tokens of each row's completion up to the string; the largest integer where it does not occur.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        super().__init__(tokenizer, list(strings))
        self.lengths: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        stopped: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        if self.lengths is None:
            self._before = input_ids.shape[1] - 1
            self.lengths = torch.full((len(input_ids),), torch.iinfo(torch.long).max, device=input_ids.device)
        here = torch.full_like(self.lengths, input_ids.shape[1] - self._before)
        self.lengths = torch.where(stopped, torch.minimum(self.lengths, here), self.lengths)
        return stopped


@contextmanager
def in_mode(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Within it all modules are in training mode, or all in evaluation; afterwards each is as it was."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


@contextmanager
def generating_by(model: Any, config: GenerationConfig, criteria: Sequence[Any], *, share: bool) -> Iterator[None]:
    """Within it `model.generate` also ends rows by `criteria`, ignores the checkpoint's configuration, and has no
    dropout, since the loss is that of the policy without dropout.

    Args:
        model: a transformers or PEFT model.
        config: in place of the model's `generation_config`, from which `generate` fills in whatever is None.
        criteria: further stopping criteria.
        share: whether equal prompts are computed once (`basis_rl.engine.prefill`). Not with a sharded model, which all
            ranks must call equally often: how often this calls it depends on the prompts of each rank.
    """
    parts = [model, model.get_base_model()] if hasattr(model, "get_base_model") else [model]
    with ExitStack() as changed:
        changed.enter_context(in_mode(model, training=False))
        for part in parts:
            changed.enter_context(attributes(part, generation_config=config))
        generate = sharing(model, model.generate) if share else model.generate
        model.generate = partial(generate, stopping_criteria=StoppingCriteriaList(criteria))
        changed.callback(delattr, model, "generate")
        yield


@torch.no_grad()
def sample(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    num_samples: int = 1,
    batch_size: int = 256,
) -> Iterator[tuple[int, list[Completion]]]:
    """Completions of each prompt, as they are ready: ``(index of the prompt, its num_samples completions)``.

    Args:
        model: a transformers or PEFT model; it is put into evaluation mode.
        tokenizer: with a pad token; prompts are padded on the left.
        prompts: token ids (`prompt_tokens`).
        sampling: how.
        num_samples: completions of each prompt.
        batch_size: sequences generated at a time (at least one prompt with all its samples).
    """
    model.eval()
    config = sampling.generation_config(model, tokenizer)
    ends = set(declared_ends(config))
    # Padding follows a rollout that ended at a stop string.
    ended = {*ends, config.pad_token_id}

    # Prompts of similar length together, for less padding. The caller gets the index with each result.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    at_a_time = max(1, batch_size // num_samples)
    with generating_by(model, config, [], share=True):
        for start in range(0, len(order), at_a_time):
            chunk = order[start : start + at_a_time]
            rows = [list(prompts[i]) for i in chunk for _ in range(num_samples)]
            inputs = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt").to(model.device)
            output = model.generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], tokenizer=tokenizer
            )
            ids = [_until_end(row, ends) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            cut = [len(row) == config.max_new_tokens and row[-1] not in ended for row in ids]
            if config.pad_token_id not in ends:
                ids = [_without(row, config.pad_token_id) for row in ids]
            completions = list(map(Completion, texts, ids, cut))
            for k, index in enumerate(chunk):
                yield index, completions[k * num_samples : (k + 1) * num_samples]


def prompt_tokens(prompt: str | list[dict[str, Any]], tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Token ids of a prompt as TRL makes them: a conversation by the chat template, a text with its special tokens."""
    if isinstance(prompt, str):
        encoded = tokenizer(prompt)
    else:
        try:
            encoded = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=True, **template_kwargs
            )
        except TemplateError as error:
            raise ValueError(
                f"The chat template cannot write the prompt {str(prompt)[:100]!r} ({type(error).__name__}: {error})."
            ) from error
    return encoded["input_ids"]


def _until_end(token_ids: list[int], ends: set[int]) -> list[int]:
    found = (position for position, token in enumerate(token_ids, 1) if token in ends)
    return token_ids[: next(found, None)]


def _without(token_ids: list[int], padding: int) -> list[int]:
    """Without the padding at the end; one token stays."""
    count = len(token_ids)
    while count > 1 and token_ids[count - 1] == padding:
        count -= 1
    return token_ids[:count]


def load_model(name: str, *, use_cpu: bool = False, **settings: Any) -> PreTrainedModel:
    """A model on the GPU, if there is one."""
    model: Any = AutoModelForCausalLM.from_pretrained(name, **settings)
    return model.to("cuda" if torch.cuda.is_available() and not use_cpu else "cpu")


def ends_of(name: str, config: object, tokenizer: PreTrainedTokenizerBase, revision: str | None) -> list[int]:
    """The end tokens that `sample` would use, without loading the model."""
    try:
        generation = GenerationConfig.from_pretrained(name, revision=revision or "main")
    except OSError:
        generation = GenerationConfig.from_model_config(config)  # type: ignore[arg-type]
    return end_tokens(generation, tokenizer)
