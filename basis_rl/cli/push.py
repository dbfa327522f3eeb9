"""``basis-rl push OUTPUT_DIR [OWNER/NAME]``."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from basis_rl.cli.main import LOST, fail, report
from basis_rl.cli.options import push_parser
from basis_rl.report.card import load_facts, save_facts
from basis_rl.report.results import BASE_FILE_NAME, FILE_NAME, results_of
from basis_rl.run.checkpoint import was_cut_off
from basis_rl.run.hub import Hub, Push, files_of_run
from basis_rl.trainer.publish import by_hand, write_readme


def main(argv: Sequence[str]) -> int:
    """Write the card again, with the results of evaluations that are there, and push the folder as one commit."""
    arguments = push_parser().parse_args(list(argv))
    folder: Path = arguments.output_dir
    try:
        facts = load_facts(folder)
        if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
            raise ValueError(
                f"'{folder}' holds no model: the run has not come to its end. Push one of its checkpoints."
            )
        if was_cut_off(folder):
            raise ValueError(
                f"'{folder}': the last save of its model was cut off. `basis-rl train` with --resume_from_checkpoint "
                "auto saves it again."
            )
        take_results(folder, arguments.results, arguments.base_results)
        name = arguments.repo_id or facts.hub_model_id or folder.absolute().name
        hub = Hub(name=name, private=arguments.private or None, revision=arguments.revision)
        name = hub.connect() or name
        facts = replace(facts, hub_model_id=name, model_name=name.split("/")[-1])
        save_facts(facts, folder)
        write_readme(facts, folder)
    except (ValueError, OSError) as error:
        return report(error)
    push = Push(message="Model, card and results", files=files_of_run(folder), by_hand=by_hand(folder))
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
    for source, name in ((own, FILE_NAME), (base, BASE_FILE_NAME)):
        if source is not None:
            path = source / FILE_NAME if source.is_dir() else source
            results_of(path)
            if path.resolve() != (folder / name).resolve():
                shutil.copy(path, folder / name)
