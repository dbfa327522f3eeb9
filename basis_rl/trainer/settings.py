"""The settings that a checkpoint was saved under, and whether a run that resumes it has the same."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from basis_rl.run.artefacts import differences, write_whole
from basis_rl.samplers.registry import sampler_name
from basis_rl.trainer.facts import baseline_name, changed_settings
from basis_rl.trainer.plan import with_tools
from basis_rl.trainer.ports import RecordedRun
from basis_rl.values.provenance import fingerprint, rendered_prompt, reward_identity

FILE = "run_settings.json"
_RENDERED = 64
_PROMPTS = "prompts as the model is given them"
# Where a run writes, what it is called and how it is watched: may differ without a word.
_BESIDE = {
    "output_dir", "overwrite_output_dir", "allow_changed_settings", "resume_from_checkpoint", "run_name", "report_to",
    "disable_tqdm", "push_to_hub", "vllm_server_base_url", "vllm_server_port", "vllm_server_host", "vllm_group_port",
    "seed", "num_generations", "generation_batch_size",
}  # fmt: skip


def settings_of(
    run: RecordedRun, tokenizer: Any, dataset: str | None, tools: Sequence[Any] = ()
) -> dict[str, dict[str, Any]]:
    """What decides a run, in JSON, without secrets. To be asked before training: parameters may be changed by it.

    Returns:
        ``fixed``: what gives the order of the data and the state their meaning, so that a resume must have the same;
        ``free``: the rest, of which a resume tells what differs; ``data``: which prompts (`load_baseline` compares).
    """
    args = run.args
    fixed = {
        "seed": args.seed,
        "data_seed": args.data_seed,
        "shuffle_dataset": args.shuffle_dataset,
        "generation_batch_size": args.generation_batch_size,
        "num_generations": args.num_generations,
        "baseline": baseline_name(run.baseline),
        **{f"baseline.{name}": _plain(value) for name, value in run.baseline.parameters.items()},
        "prompt_sampler": sampler_name(run.sampler),
        **{f"prompt_sampler.{name}": _plain(value) for name, value in run.sampler.parameters.items()},
        _PROMPTS: _rendered(run, tokenizer, tools),
    }
    free = {key: value for key, value in changed_settings(args, defaults=True).items() if key not in _BESIDE}
    free["reward"] = reward_identity(run.reward_funcs, args.reward_weights)
    free["objective"] = [args.loss_type, args.importance_sampling_level]
    whole: dict[str, dict[str, Any]] = json.loads(
        json.dumps({"fixed": fixed, "free": free, "data": {"dataset": dataset}}, default=_plain)
    )
    return whole


def _rendered(run: RecordedRun, tokenizer: Any, tools: Sequence[Any]) -> str | None:
    """A hash over the first prompts in the chat template; None for a stream, or what no template takes."""
    if not isinstance(run.train_dataset, Dataset):
        return None
    template = with_tools(run.args, tools)
    rows = run.train_dataset.select(range(min(_RENDERED, len(run.train_dataset))))
    try:
        return fingerprint("\n".join(rendered_prompt(row["prompt"], tokenizer, template) for row in rows))
    except Exception:  # images, or a processor with a template of its own
        return None


def _plain(value: Any) -> Any:
    """A parameter as JSON; what stands for much data, by a hash of it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    digest = getattr(value, "digest", None)
    if isinstance(digest, str):
        return f"{type(value).__name__} {digest[:16]}"
    if isinstance(value, Mapping):
        text = json.dumps({str(key): _plain(entry) for key, entry in value.items()}, sort_keys=True)
        return text if len(text) < 200 else f"mapping {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(entry) for entry in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, Path):
        return str(value)
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    shown = repr(value)
    return shown if " at 0x" not in shown else type(value).__name__


def save(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write them into a checkpoint."""
    write_whole(folder / FILE, json.dumps(settings, indent=1, sort_keys=True) + "\n")


def compare(folder: str | Path, now: Mapping[str, dict[str, Any]], allow: bool) -> list[str]:
    """One line for each setting of a checkpoint that this run has otherwise; none where the checkpoint has no settings.

    Raises:
        ValueError: one of them changes the order of the data or the meaning of the state, and `allow` is not set.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return []
    before = json.loads(path.read_text())
    if before["data"] != now["data"]:  # other prompts, whatever they look like: `load_baseline` says so
        now = {**now, "fixed": {**now["fixed"], _PROMPTS: before["fixed"][_PROMPTS]}}
    refused = differences(before["fixed"], now["fixed"])
    known = before["free"].keys() & now["free"].keys()  # another version has settings that this one has not
    told = differences(*({key: each["free"][key] for key in known} for each in (before, now)))
    if refused and not allow:
        raise ValueError(
            f"'{folder}' was saved under other settings, which give the order of the data or the state another "
            f"meaning: {'; '.join(refused)}. Set them back, start a new run in another output_dir, or set "
            "allow_changed_settings to resume all the same."
        )
    return [*refused, *told]
