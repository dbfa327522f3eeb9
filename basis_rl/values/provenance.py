"""What identifies a model, a prompt format and a reward, so that a value table is not used for another run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from basis_rl.rewards.source import code_identity

# Baselines read tables, and must not wait for transformers.
if TYPE_CHECKING:
    from basis_rl.engine import Sampling

# Bytes at each end of a weight file that count.
_EDGE = 1 << 20
# How many values of each parameter count.
_SAMPLE = 1024


def fingerprint(text: str) -> str:
    """First 16 hex digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def model_revision(name_or_path: str, commit: str | None = None) -> str | None:
    """The commit of a Hub model, or for a local folder a hash over its weights; None where neither is known.

    The hash covers name, size and both ends (1 MiB) of each weight file: two checkpoints of one run differ in all their
    weights, and reading a hundred gigabytes whole would cost minutes.
    """
    folder = Path(name_or_path)
    if not folder.is_dir():
        return commit
    digest = hashlib.sha256()
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_EDGE))
            file.seek(max(0, size - _EDGE))
            digest.update(file.read(_EDGE))
    return digest.hexdigest()[:16] if weights else None


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def reward_identity(reward_funcs: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> str:
    """Names of the reward functions with the ``version`` that they state, and the weights where they are not all 1.

    The rewards that environments give come last, without an entry in `weights`: TRL weighs them 1.
    """
    versions = [getattr(func, "version", None) for func in reward_funcs]
    names = [_name(func) + f"[{version}]" * bool(version) for func, version in zip(reward_funcs, versions, strict=True)]
    if weights is not None and any(w != 1 for w in weights):
        weights = [*weights, *[1.0] * (len(names) - len(weights))]
        names = [f"{w:g}*{name}" for w, name in zip(weights, names, strict=True)]
    return " + ".join(names)


def weights_fingerprint(model: torch.nn.Module) -> str | None:
    """A hash over up to 2,047 values of each parameter but an adapter's; None where this rank holds a part of them.

    Two models that were trained apart differ in all their parameters. Values are rounded to bfloat16, so that a model
    has one fingerprint in whichever precision it is loaded.
    """
    # PEFT's name for what it adds.
    adapter = getattr(getattr(model, "base_model", None), "prefix", None)
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if weight.is_meta or hasattr(weight, "ds_id") or hasattr(weight, "device_mesh"):
            return None
        if not (isinstance(adapter, str) and adapter in name):
            values = weight.detach().reshape(-1)[:: max(1, weight.numel() // _SAMPLE)]
            digest.update(f"{name}:{tuple(weight.shape)}".encode())
            digest.update(values.float().bfloat16().cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def reward_code(reward_funcs: Sequence[Callable[..., Any]]) -> str:
    """What computes the rewards, where `reward_identity` has their names and versions only (`code_identity`)."""
    models = [weights_fingerprint(func) if isinstance(func, torch.nn.Module) else None for func in reward_funcs]
    pairs = zip(reward_funcs, models, strict=True)
    return " + ".join(f"{_name(func)} {model or code_identity(func)}" for func, model in pairs)


def mismatches(table: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """One line for each fact on which table and run contradict each other; facts that either lacks are ignored."""
    keys = set(table) & set(run)
    # The revision identifies the weights, so the name may differ where it is the same, or unknown on one side.
    if "revision" in keys and (table["revision"] == run["revision"] or None in (table["revision"], run["revision"])):
        keys.discard("model")
    return [
        f"{key}: table {json.dumps(table[key])}, run {json.dumps(run[key])}"
        for key in sorted(keys)
        if table[key] is not None and run[key] is not None and table[key] != run[key]
    ]


def rendered_prompt(prompt: str | list[dict[str, Any]], tokenizer: Any, template_kwargs: Mapping[str, Any]) -> str:
    """The text that the model is given: the prompt itself, or the conversation in the tokenizer's chat template."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **template_kwargs)


def run_provenance(
    config: Any,
    tokenizer: Any,
    reward_funcs: Sequence[Callable[..., Any]],
    sampling: Sampling,
    reward_weights: Sequence[float] | None = None,
) -> dict[str, str | float]:
    """What identifies the rollouts and rewards of a run (`RunContext.provenance`); what is unknown is left out.

    Args:
        config: the model's; knows where the model came from.
        tokenizer: its chat template counts.
        reward_funcs: see `reward_identity` and `reward_code`.
        sampling: how completions are drawn; each of its settings counts.
        reward_weights: one for each reward function.
    """
    model = str(getattr(config, "_name_or_path", "") or "")
    template = getattr(tokenizer, "chat_template", None)
    # None is none too, and left out it would contradict no table.
    drawn = {**asdict(sampling), "min_p": sampling.min_p or 0.0}
    known: dict[str, Any] = {
        "model": model,
        "revision": model_revision(model, getattr(config, "_commit_hash", None)) if model else None,
        "chat_template": fingerprint(template) if isinstance(template, str) else None,
        "reward": reward_identity(reward_funcs, reward_weights),
        "reward_code": reward_code(reward_funcs),
        "max_completion_length": drawn.pop("max_new_tokens"),
        **drawn,
        "generation_kwargs": json.dumps(sampling.generation_kwargs, sort_keys=True, default=str),
    }
    return {key: value for key, value in known.items() if value not in (None, "")}
