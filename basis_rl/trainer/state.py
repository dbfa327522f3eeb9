"""What a checkpoint holds beside transformers' files: the baseline's state, the settings, each rank's parts."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from basis_rl.baselines import Baseline, baseline_name
from basis_rl.data.prompts import IMAGES
from basis_rl.engine.template_day import template_day
from basis_rl.identity import written
from basis_rl.run.artefacts import differences, versions, write_whole
from basis_rl.run.record import HOUSEKEEPING
from basis_rl.samplers import sampler_name
from basis_rl.trainer.config import changed_settings
from basis_rl.trainer.gather import prompt_ids_of
from basis_rl.trainer.plan import with_tools
from basis_rl.types import RolloutBatch
from basis_rl.values.provenance import fingerprint, rendered_prompt, reward_code, reward_identity, weights_fingerprint

FILE_NAME = "baseline_state.pt"
SETTINGS = "run_settings.json"
REFERENCE = "reference.pt"
# Prompts that are rendered for the comparison: another chat template shows in the first ones.
_RENDERED = 64
_PROMPTS = "prompts as the model is given them"
_CODE = "code of the reward"
# The gold counts even if the rewards do not declare that they read it.
_GOLD = "solution"
# Not compared here: also a run's logs and its loader, which may differ between ranks; and what ``fixed`` has already.
_BESIDE = HOUSEKEEPING | {
    "allow_changed_settings", "seed", "num_generations", "max_generations", "generation_batch_size", "rollouts",
    "local_rank", "logging_dir", "log_level", "log_level_replica", "dataloader_num_workers",
}  # fmt: skip
# Packages whose versions decide what a rank computes.
_COMPUTE = ("basis-rl", "torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "vllm", "math-verify")


def save_baseline(folder: str | Path, baseline: Baseline, step: int) -> None:
    """Write the state and the index of the next generation batch into a checkpoint folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save({"step": step, "state": baseline.state_dict()}, Path(folder) / FILE_NAME)


def load_baseline(folder: str | Path, baseline: Baseline) -> int:
    """Restore the state from a checkpoint folder and return the index of the next generation batch."""
    content = torch.load(Path(folder) / FILE_NAME, weights_only=True)
    baseline.load_state_dict(content["state"])
    return int(content["step"])


def dataset_identity(prompt_ids: Sequence[str] | None) -> str | None:
    """A hash over the ids of the training prompts in their order; None where they are not known."""
    return None if prompt_ids is None else fingerprint("".join(f"{name}\n" for name in prompt_ids))


class PendingBatches:
    """Generation batches that the baseline has not learned from yet: the policy is still being updated on them.

    Each is kept with the rollouts that were sampled for it and then discarded, if there are any.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, RolloutBatch, RolloutBatch | None]] = []

    def add(self, batch: RolloutBatch, used_up: int, discarded: RolloutBatch | None = None) -> None:
        """Keep a batch until micro-batch `used_up` of the run, the last one that trains on it."""
        self._waiting.append((used_up, batch, discarded))

    def due(self, step: int) -> Iterator[tuple[RolloutBatch, RolloutBatch | None]]:
        """The batches that are used up after `step` micro-batches, oldest first; they are kept no longer."""
        while self._waiting and self._waiting[0][0] <= step:
            _, batch, discarded = self._waiting.pop(0)
            yield batch, discarded

    def forget(self, index: int) -> None:
        """Drop the generation batches from number `index` on."""
        self._waiting = [entry for entry in self._waiting if entry[1].step < index]

    def without_gradients(self, step: int) -> bool:
        """Whether the newest batch is used up after `step` micro-batches and has no gradient energies yet."""
        return any(used_up <= step and batch.gradient_energies is None for used_up, batch, _ in self._waiting[-1:])

    def complete(self, gradient_energies: Tensor) -> None:
        """Give the newest batch what its losses told."""
        used_up, batch, discarded = self._waiting[-1]
        self._waiting[-1] = (used_up, replace(batch, gradient_energies=gradient_energies), discarded)

    @property
    def newest(self) -> RolloutBatch:
        return self._waiting[-1][1]

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": [(used_up, *(each and vars(each) for each in both)) for used_up, *both in self._waiting]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waiting = []
        for used_up, batch, discarded in state["waiting"]:
            self.add(RolloutBatch(**batch), used_up, discarded and RolloutBatch(**discarded))


def resumed_step(state: Mapping[str, Any], *, ranks: int, generate_every: int) -> int:
    """The count of micro-batches with which a run of this shape resumes.

    Args:
        state: ``step`` (TRL's count of micro-batches), ``rollouts`` in use, ``ranks`` and ``generate_every`` of the
            run that was saved.
        ranks: of this run.
        generate_every: micro-batches that one generation batch serves.

    Raises:
        ValueError: it was saved between two generations, by another number of processes or with batches of another
            shape.
    """
    now = {"ranks": ranks, "generate_every": generate_every}
    other = {key: state[key] for key in now if state[key] != now[key]}
    if state["rollouts"] is not None and other:
        raise ValueError(
            f"The checkpoint was saved in the middle of a generation batch, with {other}; this run has {now}, and its "
            "rollouts do not fit. Resume with the same number of processes, steps_per_generation and num_iterations, "
            "or from a checkpoint at the end of a generation batch."
        )
    if other:
        # At the end of a generation batch: the same number of batches, in this run's micro-batches.
        return int(state["step"]) // int(state["generate_every"]) * generate_every
    return int(state["step"])


def save_parts(folder: str | Path, rank: int, states: Mapping[str, Any]) -> None:
    """Write the states of this rank's parts into a checkpoint folder."""
    torch.save(dict(states), _parts_file(folder, rank))


def load_parts(folder: str | Path, rank: int) -> dict[str, Any]:
    """`save_parts`'s states; a rank that the saving run did not have takes the first one's."""
    path = _parts_file(folder, rank)
    path = path if path.is_file() else _parts_file(folder, 0)
    # torch cannot restore a tensor of the device "cpu:0", which is what accelerate calls a rank's CPU.
    return torch.load(path, weights_only=True, map_location="cpu")


def _parts_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"phase_{rank}.pt"


def settings_of(run: Any, base: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The settings of `run`, a `BasisTrainer`, that a resume compares with its own, as JSON without secrets.

    Call it before training, which may change parameters.

    Args:
        run: the trainer, once it is built.
        base: the model before the training: `Origin.base`, its ``weights`` (`weights_fingerprint`), ``shapes`` (a hash
            of its parameters' names and shapes), and its ``role``: what a resumed run still needs it for, None if the
            checkpoint has everything.
        tokenizer: of the policy.

    Returns:
        ``day``: on which prompts are rendered (`template_day`);
        ``fixed``: what gives the order of the data and the state their meaning, so that a resume must have the same;
        ``free``: other settings, of which a resume prints those that differ; ``data``: `_data_identity`; ``base``.
    """
    args = run.args
    baseline = run.baseline
    sampler = run.sampler
    fixed = {
        "seed": args.seed,
        "data_seed": args.data_seed,
        "shuffle_dataset": args.shuffle_dataset,
        "generation_batch_size": args.generation_batch_size,
        "num_generations": args.num_generations,
        "max_generations": args.max_generations,
        # A stream's prompts that are under way are in no other run's order.
        "rollouts": "stream" if args.streams else "sync",
        "baseline": baseline_name(baseline),
        **{f"baseline.{name}": as_json(value) for name, value in baseline.parameters.items()},
        "prompt_sampler": sampler_name(sampler),
        **{f"prompt_sampler.{name}": as_json(value) for name, value in sampler.parameters.items()},
        _PROMPTS: _rendered(run, tokenizer),
        "reward": reward_identity(run.functions, args.reward_weights),
        _CODE: reward_code(run.functions),
    }
    free = {key: value for key, value in changed_settings(args, defaults=True).items() if key not in _BESIDE}
    # Devices and folders of this machine.
    for own in ("device_map", "cache_dir"):
        free.get("model_init_kwargs", {}).pop(own, None)
    free["modules of the reward"] = [getattr(func, "__module__", None) for func in run.functions]
    free["ranks"] = args.world_size
    free["environment"] = as_json(run.environment_factories)
    found = {"fixed": fixed, "free": free, "data": _data_identity(run), "base": base, "day": template_day()}
    return json.loads(json.dumps(found, default=as_json))


def _data_identity(run: Any) -> dict[str, Any]:
    """Which rows are trained on: their prompts (`dataset_identity`), a hash of each column (None for a stream), and the
    columns that decide about the rewards (`Plan.reads`; None for all)."""
    columns = _columns(run.train_dataset) if isinstance(run.train_dataset, Dataset) else None
    reads = None if run.reads is None else sorted({*run.reads, _GOLD})
    return {"dataset": run.dataset_identity, "columns": columns, "reads": reads}


def shared_by_ranks(run: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on all ranks, by its name in messages (`require_same`).

    Args:
        run: a `BasisTrainer`.
        settings: its `settings_of`, of which the base model does not count: the first rank's weights go to all others.
    """
    data = settings["data"]
    found = {**settings["free"], **settings["fixed"], **versions(*_COMPUTE), "training prompts": data["dataset"]}
    found["parameters of the model"] = settings["base"]["shapes"]
    digests = data["columns"] or {}
    found |= {f"column {name}": digests.get(name) for name in {"prompt", *(data["reads"] or digests)}}
    evaluated = run.eval_dataset if isinstance(run.eval_dataset, dict) else {"": run.eval_dataset}
    for name, rows in evaluated.items():
        found[f"eval_dataset {name}".strip()] = dataset_identity(prompt_ids_of(rows, run.reads))
    # Each rank loads its own; with FSDP it has a part of it.
    if run.ref_model is not None and not run.is_fsdp_enabled:
        found["weights of the KL reference"] = weights_fingerprint(run.ref_model)
    return found


def _columns(dataset: Dataset) -> dict[str, str]:
    # Images are large.
    digests = {name: hashlib.sha256() for name in dataset.column_names if name not in IMAGES}
    for batch in dataset.with_format("arrow").iter(1000):
        for name, digest in digests.items():
            digest.update(written(batch[name].to_pylist()).encode(errors="surrogatepass"))
    return {name: digest.hexdigest()[:16] for name, digest in digests.items()}


def _rendered(run: Any, tokenizer: Any) -> str | None:
    """A hash over the first prompts in the chat template; None for a stream, or what no template takes."""
    dataset = run.train_dataset
    if not isinstance(dataset, Dataset):
        return None
    template = with_tools(run.args, run.tools or [])
    rows = dataset.select(range(min(_RENDERED, len(dataset))))
    try:
        return fingerprint("\n".join(rendered_prompt(row["prompt"], tokenizer, template) for row in rows))
    except Exception:
        # Images, or a processor with a template of its own.
        return None


def as_json(value: Any) -> Any:
    """A parameter as JSON; an object with much data becomes a hash."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    digest = getattr(value, "digest", None)
    if isinstance(digest, str):
        return f"{type(value).__name__} {digest[:16]}"
    if isinstance(value, Mapping):
        text = json.dumps({str(key): as_json(entry) for key, entry in value.items()}, sort_keys=True)
        return text if len(text) < 200 else f"mapping {fingerprint(text)}"
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(entry) for entry in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, Path):
        return str(value)
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    shown = repr(value)
    return shown if " at 0x" not in shown else type(value).__name__


def save_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write them into a checkpoint."""
    write_whole(folder / SETTINGS, json.dumps(settings, indent=1, sort_keys=True) + "\n")


def saved_settings(folder: str | Path | None) -> dict[str, Any]:
    """`save_settings`'s; empty for no checkpoint.

    Raises:
        ValueError: the checkpoint has none.
    """
    if folder is None:
        return {}
    path = Path(folder) / SETTINGS
    if not path.is_file():
        raise ValueError(
            f"'{folder}' has no {SETTINGS}: it was saved with save_only_model, or by another trainer. Start a new run "
            "from its model."
        )
    return json.loads(path.read_text())


def save_reference(folder: str | Path, reference: torch.nn.Module) -> None:
    """Write the weights of a KL reference that changes during the run into a checkpoint."""
    torch.save(reference.state_dict(), Path(folder) / REFERENCE)


def load_reference(folder: str | Path, reference: torch.nn.Module) -> None:
    """Restore `save_reference`'s weights.

    Raises:
        ValueError: the checkpoint has none.
    """
    path = Path(folder) / REFERENCE
    if not path.is_file():
        raise ValueError(
            f"'{folder}' has no {REFERENCE}, the KL reference that sync_ref_model has changed: the resumed run would "
            "have that of the beginning. Start a new run, or set sync_ref_model to false."
        )
    reference.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def refuse_repeated_stream(folder: str | Path, dataset: Any) -> None:
    """Refuse to resume a stream after its first epoch: it would begin with the rows of the first one again.

    Raises:
        ValueError: it has.
    """
    epoch = json.loads((Path(folder) / "trainer_state.json").read_text()).get("epoch") or 0.0
    if epoch >= 1 and not isinstance(dataset, Dataset):
        raise ValueError(
            f"'{folder}' is of epoch {int(epoch)} of a stream, where a resume would repeat rows of an earlier epoch. "
            "Load the dataset without streaming, or resume an earlier checkpoint."
        )


def compare_settings(folder: str | Path, now: Mapping[str, Any], allow: bool) -> list[str]:
    """One line for each setting in which this run differs from a checkpoint.

    Raises:
        ValueError: one of them changes the order of the data or the meaning of the state, and `allow` is not set; or
            prompts are others, or columns that the rewards read have other values.
    """
    before = saved_settings(folder)
    there, here = (each["data"]["dataset"] for each in (before, now))
    read, beside = _other_columns(before["data"], now["data"])
    other = f"rows with other values in {golds}" if (golds := sorted(read - {"prompt"})) else ""
    if there != here and None not in (there, here):
        other = "other prompts"
    if other:
        raise ValueError(
            f"'{folder}' was saved while training on {other}. Resume with the same dataset, in the same order, or "
            "start a new run from the checkpoint's model."
        )
    refused = differences(before["fixed"], now["fixed"]) + [
        f"column {name} of the dataset: other values" for name in read
    ]
    # Another version of TRL or transformers may have other settings, so compare what both have.
    known = before["free"].keys() & now["free"].keys()
    changed = differences(*({key: each["free"][key] for key in known} for each in (before, now)))
    changed += [f"column {name} of the dataset, which no reward names: other values" for name in sorted(beside)]
    if before["base"]["shapes"] != now["base"]["shapes"]:
        refused.append("parameters of the model: other names or shapes")
    if other := _other_base(before["base"], now["base"]):
        (refused if now["base"]["role"] else changed).append(other)
    if refused and not allow:
        raise ValueError(
            f"'{folder}' was saved under other settings, which change the order of the data or the meaning of the "
            f"state: {'; '.join(refused)}. Set them back, start a new run in another output_dir, or set "
            "allow_changed_settings to resume all the same."
        )
    return [*refused, *changed]


def _other_columns(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """The columns of the dataset that have other values: those that decide about rewards, and the others."""
    there, here = (each["columns"] for each in (before, now))
    if there is None or here is None:
        return set(), set()
    other = {name for name in {*there, *here} if there.get(name) != here.get(name)} - {"prompt_id"}
    if None in (before["reads"], now["reads"]):
        return other, set()
    read = other & {"prompt", *before["reads"], *now["reads"]}
    return read, other - read


def _other_base(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is said of another base model: its weights decide, where they are not known its revision, else its name."""
    key = next((key for key in ("weights", "base_revision") if before[key] and now[key]), "base_model")
    if before[key] == now[key]:
        return ""
    old, new = (f"{each['base_model']} ({key.removeprefix('base_')} {each[key]})" for each in (before, now))
    return f"base model: {old}, now {new}" + (f", {now['role']}" if now["role"] else "")
