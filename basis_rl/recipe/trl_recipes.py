"""Recipes written for ``trl grpo``, in this package's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# TRL's names of rewards, with those of this package and the parameters that TRL's script gives them.
TRL_REWARDS: dict[str, tuple[str, dict[str, Any]]] = {
    "accuracy_reward": ("math_verify", {}),
    "reasoning_accuracy_reward": ("math_verify", {}),
    "think_format_reward": ("format", {"form": "think"}),
    "get_soft_overlong_punishment": ("overlong", {"max_completion_length": 1280, "cache": 256}),
}
_WITHOUT_MEANING = ("dataset_streaming", "streaming", "ignore_bias_buffers", "test_split_size")


def from_trl(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The keys of a recipe's file with TRL's own translated, and a sentence for each translation.

    ``datasets`` with one entry becomes ``dataset_name``, and keys without a meaning here are left out; for the rewards
    see `translate_rewards`, for ``scale_rewards`` `basis_rl.trainer.plan.baseline_of_settings`. A recipe of this
    package comes back as it is.

    Raises:
        ValueError: what cannot be translated: several datasets, a reward model.
    """
    result = dict(config)
    notes = []
    for key in _WITHOUT_MEANING:
        if result.pop(key, None):
            notes.append(f"TRL's key {key} is left out: it has no meaning here.")
    if result.pop("reward_model_name_or_path", None):
        raise ValueError(
            "reward_model_name_or_path: basis-rl trains with verifiable rewards and loads no reward model. Give a "
            "function of your own: reward_funcs: [my_lib.rewards:mine]."
        )
    _take_datasets(result, notes)
    return result, notes


def _take_datasets(config: dict[str, Any], notes: list[str]) -> None:
    """``datasets: [{path, name, split}]`` as ``dataset_name``, ``dataset_config`` and ``dataset_train_split``."""
    datasets = config.pop("datasets", None)
    if not datasets:
        return
    meant = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
    if len(datasets) != 1 or not isinstance(datasets[0], Mapping) or set(datasets[0]) - meant.keys():
        raise ValueError(
            "datasets: basis-rl trains on one dataset. Give one entry with path, name and split, or the key "
            "dataset_name with a file that holds the mixture."
        )
    config.update({meant[key]: value for key, value in datasets[0].items()})
    notes.append(f"TRL's key datasets is read as dataset_name: {config['dataset_name']}.")


def translate_rewards(names: list[str]) -> tuple[list[str], dict[str, Any], list[str]]:
    """TRL's names of rewards as this package's, the parameters that go with them, and what was translated."""
    found = {name: TRL_REWARDS[name] for name in names if name in TRL_REWARDS}
    notes = []
    for name, (own, params) in found.items():
        shown = f" with {', '.join(f'{k} {v}' for k, v in params.items())}" if params else ""
        notes.append(f"TRL's reward {name} is read as {own}{shown}.")
    parameters = {own: params for own, params in found.values() if params}
    return [TRL_REWARDS[name][0] if name in found else name for name in names], parameters, notes
