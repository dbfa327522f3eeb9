"""``basis-rl push OUTPUT_DIR [OWNER/NAME]``."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from basis_rl.cli.main import LOST, fail
from basis_rl.cli.options import push_parser
from basis_rl.report.card import results_of, write_card
from basis_rl.run.hub import Hub, Push, files_of_run
from basis_rl.run.record import BASE_RESULTS, RESULTS, is_finished, load_run_info, save_run_info


def main(argv: Sequence[str]) -> int:
    """Write the card again, with the results of evaluations that are there, and push the folder as one commit."""
    arguments = push_parser().parse_args(list(argv))
    folder: Path = arguments.output_dir
    info = load_run_info(folder)
    if not is_finished(folder):
        raise ValueError(
            f"'{folder}' holds no model of the end of its run: the run has not come there, or the save was cut off. A "
            "model in it may be that of an earlier end. `basis-rl train` with --resume_from_checkpoint auto makes the "
            "new one; or push one of its checkpoints."
        )
    take_results(folder, arguments.results, arguments.base_results)
    name = arguments.repo_id or info.hub_model_id or folder.absolute().name
    hub = Hub(name=name, folder=folder, private=arguments.private or None, revision=arguments.revision)
    reached = hub.connect()
    name = reached or name
    info = replace(info, hub_model_id=name, model_name=name.split("/")[-1])
    save_run_info(info, folder)
    write_card(info, folder)
    if reached is None:
        return fail(f"'{folder}' could not be pushed. Its card and record are written: push again later.", LOST)
    push = Push(message="Model, card and results", files=files_of_run(folder, arguments.push_rollouts))
    pushed = hub.submit(push).result()
    if pushed is None:
        return fail(f"'{folder}' could not be pushed.", LOST)
    print(f"Pushed: {pushed.commit_url}")
    return 0


def take_results(folder: Path, own: Path | None, base: Path | None) -> None:
    """Copy results of evaluations to where the card looks for them.

    Raises:
        ValueError: a file that is not the result of an evaluation.
    """
    for source, name in ((own, RESULTS), (base, BASE_RESULTS)):
        if source is not None:
            path = source / RESULTS if source.is_dir() else source
            results_of(path)
            if path.resolve() != (folder / name).resolve():
                shutil.copy(path, folder / name)
