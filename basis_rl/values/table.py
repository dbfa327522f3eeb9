"""`ValueTable`: rewards of the reference model's rollouts, prompt by prompt, and the values that follow from them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from torch import Tensor

from basis_rl.functional.basis import tilt_bernoulli, tilt_samples
from basis_rl.run.artefacts import Kind
from basis_rl.run.record import is_hub_id
from basis_rl.text import render
from basis_rl.types import RunContext
from basis_rl.values.provenance import mismatches

KIND = Kind("value table", "rewards.parquet", 1, "basis-rl values RECIPE")
_REBUILD = "Build a table for this run with `basis-rl values RECIPE`"


class ValueTable:
    """Rewards of ``n`` reference rollouts for each of P prompts, with their provenance.

    On disk it is a folder: ``rewards.parquet`` (prompt_id, fingerprint of the rendered prompt, rewards) and
    ``metadata.json`` (format, reward range, provenance).

    Attributes:
        provenance: what identifies the rollouts: model, revision, chat template, reward, sampling parameters, date.
        reward_range: ``(low, high)``, the scale on which values live; see `tilt`.
        source: where the table came from, for messages.
    """

    def __init__(
        self,
        rewards: Mapping[str, Sequence[float]],
        *,
        fingerprints: Mapping[str, str] | None = None,
        provenance: Mapping[str, Any] | None = None,
        reward_range: tuple[float, float] | None = None,
        source: str = "in memory",
    ) -> None:
        self.prompt_ids = list(rewards)
        self._row = {prompt_id: row for row, prompt_id in enumerate(self.prompt_ids)}
        self.fingerprints = dict(fingerprints or {})
        self.provenance = dict(provenance or {})
        self.source = source
        # None becomes NaN.
        cells = [np.asarray(row, np.float64) for row in rewards.values()]
        scored = [row[~np.isnan(row)] for row in cells]
        if not scored:
            raise ValueError("A value table needs at least one prompt.")
        empty = [prompt_id for prompt_id, row in zip(self.prompt_ids, scored, strict=True) if row.size == 0]
        if empty:
            raise ValueError(f"{len(empty)} prompts have no scored rollout (first: '{empty[0]}'). Leave them out.")
        self._rewards = scored
        self._count = torch.tensor([float(rs.size) for rs in scored], dtype=torch.float64)
        flat = np.concatenate(scored)
        self.reward_range = reward_range or _default_range(flat)
        low, high = self.reward_range
        if not low < high or flat.min() < low or flat.max() > high:
            raise ValueError(f"reward_range {self.reward_range} must hold all rewards ({flat.min()} to {flat.max()}).")
        self._mean = torch.tensor([(rs.mean() - low) / (high - low) for rs in scored], dtype=torch.float64)
        self._binary = bool(np.isin(flat, self.reward_range).all())

    @classmethod
    def from_rewards(cls, rewards: Mapping[str, Sequence[float]], **kwargs: Any) -> ValueTable:
        """A table from ``{prompt_id: [reward of each reference rollout]}``; NaN and None are left out.

        Raises:
            ValueError: no prompts, or a prompt without a scored rollout.
        """
        return cls(rewards, **kwargs)

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self._row

    def rewards(self, prompt_id: str) -> list[float]:
        """The scored rewards of one prompt, which must be in the table."""
        (row,) = self._rows([prompt_id])
        return self._rewards[row].tolist()

    @property
    def means(self) -> Tensor:
        """``(P,)`` mean reward of each prompt, on the scale where ``reward_range`` is (0, 1)."""
        return self._mean

    def counts(self, prompt_ids: Sequence[str]) -> Tensor:
        """``(P,)`` float64: scored reference rollouts of each prompt, which must be in the table."""
        return self._count[self._rows(prompt_ids)]

    def _rows(self, prompt_ids: Sequence[str]) -> list[int]:
        try:
            return [self._row[prompt_id] for prompt_id in prompt_ids]
        except KeyError as error:
            raise ValueError(f"prompt_id {error} is not in the value table ({self.source}). {_REBUILD}.") from None

    @property
    def digest(self) -> str:
        """SHA-256 over prompt ids, rewards and their range: equal tables have equal ones, wherever they are."""
        digest = hashlib.sha256(repr(self.reward_range).encode())
        for prompt_id, row in sorted(self._row.items()):
            digest.update(f"{prompt_id}:{self._rewards[row].tolist()}\n".encode())
        return digest.hexdigest()

    @property
    def template_day(self) -> str | None:
        """The day that chat templates wrote into its prompts (`basis_rl.engine.template_day`)."""
        return self.provenance.get("template_day")

    def tilt(self, prompt_ids: Sequence[str], smoothing: float = 0.0) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Mean and variance of the reward under the tilted reference policy, as a function of beta (BASIS Eq. 5).

        Rewards are taken on the scale where ``reward_range`` is (0, 1), and ``beta`` with them: for 0/1 rewards that is
        the paper; for others it makes the values equivariant under any change of the reward's unit. ``smoothing = s``
        adds s pseudo-rollouts at each end of the range, ``p = (k + s) / (n + 2 s)`` for k successes; s = 0.5 is the
        Jeffreys prior, s = 0 the paper.

        Args:
            prompt_ids: N ids, all in the table.
            smoothing: s >= 0.

        Returns:
            A function from ``betas`` (``(K,)``, positive; infinity is the reference policy) to values and variances,
            each ``(K, N)`` float64, in (0, 1) units. The table is looked up once, not at each call.
        """
        rows = self._rows(prompt_ids)
        if self._binary:
            n = self._count[rows]
            p = self._mean[rows]
            return partial(tilt_bernoulli, (p * n + smoothing) / (n + 2 * smoothing))
        low, high = self.reward_range
        width = max(len(self._rewards[row]) for row in rows) + 2
        samples = np.full((len(rows), width), np.nan)
        weights = np.ones((len(rows), width))
        # The first two columns are the pseudo-rollouts at the ends of the range.
        samples[:, 0] = 0.0
        samples[:, 1] = 1.0
        weights[:, :2] = smoothing
        for i, row in enumerate(rows):
            samples[i, 2 : 2 + len(self._rewards[row])] = (self._rewards[row] - low) / (high - low)
        return partial(tilt_samples, torch.from_numpy(samples), torch.from_numpy(weights))

    def check(self, run: RunContext, *, accept_mismatch: bool = False) -> None:
        """Refuse a run that this table was not built for.

        Raises:
            ValueError: a training prompt is not in the table, or model, template, reward or sampling contradict the
                run's (not raised with `accept_mismatch`). Both sides are named.
        """
        missing = [prompt_id for prompt_id in run.prompts if prompt_id not in self._row]
        if missing:
            share = f"{len(missing)} of {len(run.prompts)} training prompts"
            example = f"the first is prompt_id '{missing[0]}'"
            raise ValueError(
                f"{share} are not in the value table ({self.source}); {example}. {_REBUILD}, or leave them out. "
                "(A dataset that `load_prompts` did not make needs the table's ids as `prompt_id`.)"
            )
        if accept_mismatch:
            return
        problems = mismatches(self.provenance, run.provenance)
        rendered = {k: v for k, v in run.prompts.items() if self.fingerprints.get(k, v) != v}
        if rendered and not any(problem.startswith("chat_template") for problem in problems):
            first, there = next(iter(rendered.items()))
            example = f"prompt_id '{first}': table {self.fingerprints[first]}, run {there}"
            what = f"{len(rendered)} prompts are rendered otherwise (system prompt or prompt template)"
            problems.append(f"prompt text: {what}; {example}")
        if problems:
            found = f"The value table ({self.source}) was built for another run:"
            way_out = f"{_REBUILD}, or if it fits, set `accept_mismatch: true` in `baseline_kwargs`."
            raise ValueError("\n  ".join([found, *problems]) + f"\n{way_out}")

    def save(self, path: str | Path) -> Path:
        """Write the folder `path`, replacing a table that is there."""
        columns = {
            "prompt_id": self.prompt_ids,
            "fingerprint": [self.fingerprints.get(prompt_id) for prompt_id in self.prompt_ids],
            "rewards": [rs.tolist() for rs in self._rewards],
        }
        types = {"prompt_id": pa.string(), "fingerprint": pa.string(), "rewards": pa.list_(pa.float64())}
        table = pa.table(columns, schema=pa.schema(types.items()))
        metadata = {"reward_range": self.reward_range, "provenance": self.provenance}
        return KIND.write(Path(path), {KIND.main_file: table}, metadata)

    @classmethod
    def load(cls, path_or_hub_id: str | Path, *, revision: str | None = None) -> ValueTable:
        """A table from a folder, or from a dataset repository on the Hub (``owner/name``).

        Raises:
            ValueError: neither a table's folder nor a repository that can be read.
        """
        folder, metadata = KIND.open(path_or_hub_id, revision)
        with KIND.naming_damage(path_or_hub_id):
            return cls._read(folder, metadata, str(path_or_hub_id))

    @classmethod
    def of(cls, given: ValueTable | str | Path) -> ValueTable:
        """A table as it is, or the one to `load`."""
        return given if isinstance(given, ValueTable) else cls.load(given)

    @classmethod
    def _read(cls, folder: Path, metadata: Mapping[str, Any], source: str) -> ValueTable:
        table = pq.read_table(folder / KIND.main_file).to_pydict()
        ids = table["prompt_id"]
        rewards = table["rewards"]
        if len(set(ids)) < len(ids) or not all(isinstance(name, str) for name in ids):
            raise ValueError("a prompt_id occurs twice, or is not a string")
        for name, row in zip(ids, rewards, strict=True):
            if not isinstance(row, list) or any(r is not None and (isinstance(r, str) or math.isinf(r)) for r in row):
                raise ValueError(f"the rewards of prompt_id '{name}' are not finite numbers")
        if not isinstance(metadata["provenance"], dict):
            raise ValueError("its provenance is not a mapping")
        fingerprints = zip(ids, table["fingerprint"], strict=True)
        low, high = metadata["reward_range"]
        return cls(
            dict(zip(ids, rewards, strict=True)),
            fingerprints={prompt_id: value for prompt_id, value in fingerprints if value is not None},
            provenance=metadata["provenance"],
            reward_range=(float(low), float(high)),
            source=source,
        )

    def describe(self) -> str:
        """The distribution of the mean rewards as text: a histogram of ten bins, and the shares at both ends."""
        counts = torch.histc(self._mean, bins=10, min=0, max=1).long().tolist()
        lines = [f"{len(self)} prompts, mean reward {float(self._mean.mean()):.3f} (as a share of {self.reward_range})"]
        for i, count in enumerate(counts):
            bar = "#" * round(40 * count / max(counts))
            lines.append(f"  {i / 10:.1f} - {(i + 1) / 10:.1f}  {count:7d}  {bar}")
        never = float((self._mean == 0).double().mean())
        always = float((self._mean == 1).double().mean())
        lines.append(f"  never solved {never:.1%}, always solved {always:.1%}")
        return "\n".join(lines)

    def card(self, repo_id: str) -> str:
        """The README of the dataset repository `repo_id`: front matter, how the table was built, how to load it.

        It names no license, which the owner has to add.
        """
        known = self.provenance
        model = str(known.get("model") or "an unnamed model")
        # Without the path, if it is a local folder.
        name = model if is_hub_id(model) else Path(model).name
        front: dict[str, Any] = {
            "pretty_name": f"Value table of {name}",
            "tags": ["basis-rl", "value-table", "reinforcement-learning", "rlvr"],
            "configs": [{"config_name": "default", "data_files": KIND.main_file}],
            **({"base_model": model} if is_hub_id(model) else {}),
        }
        shown = {**known, "model": name if known.get("model") else None}
        shown["early_exit"] = f"{known['early_exit']} rollouts" if known.get("early_exit") else None
        if known.get("truncated") is not None and known.get("rollouts"):
            shown["truncated"] = f"{known['truncated']} ({known['truncated'] / known['rollouts']:.1%})"
        least, most = (int(count) for count in self._count.aminmax())
        return render(
            Path(__file__).with_name("card.md.jinja"),
            front=yaml.safe_dump(front, sort_keys=False).rstrip(),
            name=name,
            repo_id=repo_id,
            prompts=len(self),
            rollouts=f"{least}" if least == most else f"{least} to {most}",
            shown=shown,
            exit_after=known.get("early_exit"),
            planned=known.get("num_rollouts"),
            description=self.describe(),
        )

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the table as a dataset repository, with a card, and return its address."""

        def save(path: Path) -> Path:
            folder = self.save(path)
            (folder / "README.md").write_text(self.card(repo_id))
            return folder

        return KIND.push(save, repo_id, private=private, token=token)


def _default_range(rewards: np.ndarray) -> tuple[float, float]:
    low = float(rewards.min())
    high = float(rewards.max())
    # Rewards between 0 and 1 have that range, even if none of them reaches an end.
    return (0.0, 1.0) if low >= 0.0 and high <= 1.0 else (low, high if high > low else low + 1.0)
