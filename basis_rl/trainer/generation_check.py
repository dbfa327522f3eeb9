"""Checks of the settings that draw rollouts: the loss must be of the distribution that sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig

from basis_rl.engine.local import VLLM_DRAWING, VLLM_SAMPLING
from basis_rl.names import did_you_mean
from basis_rl.trainer.config import BasisConfig

# Keys of `generation_kwargs` for which the run has a setting; loss, logs and value tables use the setting.
_SETTINGS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_length"), "max_completion_length"),
}
# Keys with one legal value, and why there is no other.
_FIXED: dict[str, tuple[Any, str]] = {
    "do_sample": (True, "all rollouts of a prompt would be the same"),
    "num_return_sequences": (1, "num_generations sets the number of rollouts per prompt"),
    "n": (1, "num_generations sets the number of rollouts per prompt"),
    "num_beams": (1, "the loss is that of samples, which the result of a beam search is not"),
    "seed": (None, "requests with one seed draw with the same random numbers, so that rollouts would be copies"),
    "logprobs": (0, "the loss reads the log-probability of the sampled token"),
}
# Settings for which transformers builds a processor of logits that leaves their distribution as it is, and the one that
# the loss knows.
_HARMLESS = ("temperature", "remove_invalid_values", "renormalize_logits")


class _AnyModel(GenerationMixin):
    """As much of a model as transformers reads when it builds processors of logits."""

    config = PreTrainedConfig.from_dict({"vocab_size": 2})


def generation_kwargs_of(args: BasisConfig) -> dict[str, Any]:
    """`generation_kwargs`, which may be given as JSON."""
    given = args.generation_kwargs
    return dict(json.loads(given) if isinstance(given, str) else given or {})


def check_generation(args: BasisConfig) -> None:
    """The engine knows all `generation_kwargs`, and none of them contradicts a setting of the run.

    Raises:
        ValueError: a key that the engine does not know, or that contradicts a setting.
    """
    # TRL itself sets disable_compile.
    of_transformers = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"disable_compile"}
    known = VLLM_SAMPLING if args.use_vllm else of_transformers
    given = generation_kwargs_of(args)
    if args.mask_truncated_completions and (given.get("stop_strings") or given.get("stop")):
        raise ValueError(
            "mask_truncated_completions leaves rollouts without an end token out of the loss, and so every one that "
            "ends at a stop string of generation_kwargs. Leave one of them out, or name an end token (eos_token_id; "
            "with vLLM stop_token_ids)."
        )
    for name, value in given.items():
        if name not in known:
            engine = "vLLM's SamplingParams" if args.use_vllm else "transformers' GenerationConfig"
            raise ValueError(f"generation_kwargs: {engine} has no '{name}'.{did_you_mean(name, known)}")
        setting = _SETTINGS.get(name)
        if setting is not None and value != getattr(args, setting):
            raise ValueError(
                f"generation_kwargs: {name} {value} would be sampled with, but the run goes by {setting} "
                f"({getattr(args, setting)}). Leave the key out, or set {setting} itself."
            )
        only, why = _FIXED.get(name, (value, ""))
        if value != only:
            raise ValueError(f"generation_kwargs: {name} {value} is not possible: {why}. Leave the key out.")


def check_truncated_sampling(args: BasisConfig) -> None:
    """Rollouts are drawn from the policy's own distribution, of which the loss takes its log-probabilities.

    Raises:
        ValueError: a setting changes that distribution, and ``allow_truncated_sampling`` is not set.
    """
    settings = {name: getattr(args, name) for name in _SETTINGS if hasattr(args, name)}
    settings["structured_outputs"] = args.vllm_structured_outputs_regex
    changes = _changes_vllm if args.use_vllm else _changes_transformers
    found = [
        f"{name} {value}" for name, value in (settings | generation_kwargs_of(args)).items() if changes(name, value)
    ]
    if found and not args.allow_truncated_sampling:
        raise ValueError(
            f"{', '.join(found)}: rollouts would be drawn from another distribution than the policy's, but the loss "
            "takes the policy's probabilities of them, so that ratios and gradients would be wrong. Leave it out in "
            "training (eval has settings of its own), or set allow_truncated_sampling: true."
        )


def _changes_vllm(name: str, value: Any) -> bool:
    """Whether vLLM draws by this field of its requests, which is not at its neutral value."""
    return name in VLLM_DRAWING and bool(value) and not (name in ("top_p", "repetition_penalty") and value == 1)


def _changes_transformers(name: str, value: Any) -> bool:
    """Whether transformers builds a processor of logits for this setting."""
    if name in _HARMLESS or (name, value) == ("min_p", 0):
        return False
    config = GenerationConfig(**{"do_sample": True, name: value})
    # `generate` sets it from the end tokens, without which some processors are left out.
    config._eos_token_tensor = torch.zeros(1, dtype=torch.long)
    # It also has the prompt for some that were made for encoders.
    prompt = torch.zeros(1, 1, dtype=torch.long)
    model: Any = _AnyModel()
    return bool(model._get_logits_processor(config, prompt.shape[1], prompt))


def require_tokens(completion_ids: Sequence[Sequence[int]], source: str) -> None:
    """Each first turn has a token, as the loss and TRL's logs need.

    Raises:
        RuntimeError: one has none.
    """
    empty = [index for index, ids in enumerate(completion_ids) if not len(ids)]
    if empty:
        raise RuntimeError(
            f"{source} returned {len(empty)} of {len(completion_ids)} rollouts without a token (the first is "
            f"{empty[0]}). A rollout has at least an end token."
        )
