"""What a run says about itself (``run.json``): the model card and the comparison of runs are made from it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from basis_rl.run.artefacts import write_whole
from basis_rl.run.checkpoint import was_cut_off

RUN_FILE = "run.json"
RESULTS = "results.json"
BASE_RESULTS = "base_results.json"
# Keys that do not change what a run learns: where it writes, what it keeps and pushes, its servers.
HOUSEKEEPING = frozenset({
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "run_name", "report_to", "disable_tqdm",
    "keep_rollouts_mb", "push_rollouts", "push_to_hub", "vllm_server_base_url", "vllm_server_port", "vllm_server_host",
    "vllm_group_port",
})  # fmt: skip
_HUB_ID = re.compile(r"[\w\-][\w.\-]*/[\w.\-]+")


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What its card tells about a run, and what distinguishes it from others in a comparison.

    All of it is public, so no field may hold a secret. `base_model` is a Hub id or the name of a folder,
    `base_revision` a commit or a hash of the weights, `settings` further rows of the card, and `compared` what
    distinguishes runs even where the recipe leaves it at the default. `license` has the keys of a card: ``license``
    (``apache-2.0``), with ``license_name`` and ``license_link`` if it is ``other``. `artefacts` are the value table or
    prompt codebook (``kind``) that the baseline was given, from a Hub id or path (``source``), with the hash of its
    content (``sha256``), how it was made (``provenance``), and how many ``rollouts`` that took, once.
    """

    model_name: str
    hub_model_id: str | None = None
    base_model: str
    base_on_hub: bool = False
    base_revision: str | None = None
    license: Mapping[str, str | None] | None = None
    datasets: Sequence[str] = ()
    data: str = ""
    baseline: str
    baseline_parameters: Mapping[str, str] = field(default_factory=dict)
    sampler: str = "uniform"
    sampler_parameters: Mapping[str, str] = field(default_factory=dict)
    artefacts: Sequence[Mapping[str, Any]] = ()
    objective: str
    reward: str
    settings: Mapping[str, str] = field(default_factory=dict)
    compared: Mapping[str, float] = field(default_factory=dict)
    step: int
    max_steps: int
    rollouts: int
    reward_curve: Sequence[float] | None = None
    seed: int
    hardware: str
    versions: Mapping[str, str] = field(default_factory=dict)
    recipe: str
    command: str | None = None
    library: str = "transformers"
    tags: Sequence[str] = ()
    finished: bool = False


def is_hub_id(name: str) -> bool:
    """Whether a name is one of the Hub, and not a file or folder on this machine."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def save_run_info(info: RunInfo, folder: str | Path) -> None:
    """Write ``run.json`` into the folder of a run."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_whole(Path(folder) / RUN_FILE, json.dumps(asdict(info), indent=2, default=str) + "\n")


def load_run_info(folder: str | Path) -> RunInfo:
    """Read the ``run.json`` of a run's folder; a ValueError if there is none, or it cannot be read."""
    path = Path(folder) / RUN_FILE
    if not path.is_file():
        raise ValueError(f"'{folder}' has no {RUN_FILE}: it is not the output_dir of a run of basis-rl.")
    try:
        return RunInfo(**json.loads(path.read_text()))
    except TypeError as error:
        raise ValueError(f"'{path}' cannot be read: {error}.") from error


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a run that was trained to its end, with its model saved to the last byte."""
    has_model = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    whole = has_model and (folder / RUN_FILE).is_file() and not was_cut_off(folder)
    return whole and bool(json.loads((folder / RUN_FILE).read_text()).get("finished"))
