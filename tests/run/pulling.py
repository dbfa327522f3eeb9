"""What another machine makes of what was pushed, by way of the Hub alone: ``python -m tests.run.pulling``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import yaml
from huggingface_hub import HfApi, snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

from basis_rl.cli.main import main as command
from basis_rl.clusters import PromptClusters
from basis_rl.recipe.build import load_config_and_tokenizer, load_training_data
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.words import with_sections
from basis_rl.values import ValueTable
from tests.cli.conftest import SETTINGS
from tests.report.test_card import entry
from tests.run.pushing import run
from tests.run.test_hub import TOKEN, job

torch.set_num_threads(1)


def train_by_recipe(folder: Path, base: Path) -> tuple[list[int], list[str]]:
    """Base model, table and data from the Hub, `basis-rl train`, an evaluation, `basis-rl push`."""
    (folder / "base_card").mkdir()
    (folder / "base_card" / "README.md").write_text("---\nlicense: apache-2.0\n---\n\nA base model.\n")
    api = HfApi()
    api.create_repo("base", exist_ok=True)
    for path in (base, folder / "base_card"):
        api.upload_folder(repo_id="alice/base", folder_path=path)
    recipe, out = folder / "recipe.yaml", folder / "cli"
    settings = {**SETTINGS, "baseline": "basis", "baseline_kwargs": {"values": "alice/table"}, "num_generations": 1}
    own = {"model_name_or_path": "alice/base", "output_dir": str(out), "push_to_hub": True, "hub_token": TOKEN}
    recipe.write_text(yaml.safe_dump(with_sections({**settings, **own, "save_strategy": "steps", "save_steps": 1})))
    parsed = parse_recipe([str(recipe)])
    _, tokenizer = load_config_and_tokenizer(parsed.model, parsed.args)
    ids = load_training_data(parsed, tokenizer)["prompt_id"]
    table = ValueTable.from_rewards({p: [float(i % 3 == 0), 1.0, 0.0] for i, p in enumerate(ids)})
    table.push_to_hub("alice/table")
    codes = [command(["train", str(recipe), "--hub_token", TOKEN])]
    (out / "results.json").write_text(json.dumps({"math500": entry(0.5, 1)}))
    (folder / "of_base.json").write_text(json.dumps({"math500": entry(0.25, 1)}))
    codes.append(command(["push", str(out), "--base_results", str(folder / "of_base.json")]))
    return codes, [table.digest, ValueTable.load("alice/table").digest]


def main() -> None:
    base, folder = map(Path, sys.argv[1:])
    model = AutoModelForCausalLM.from_pretrained("alice/end")
    model.save_pretrained(folder / "from_hub")
    prompt = AutoTokenizer.from_pretrained("alice/end")("1 + 2 =", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=4).shape[1] - prompt["input_ids"].shape[1]

    last = Path(snapshot_download("alice/checkpoint", revision="dev", allow_patterns="last-checkpoint/*"))
    last = last / "last-checkpoint"
    settings = {"push_to_hub": False, "max_steps": 4, "save_strategy": "no"}
    run({**job("resumed", folder, baseline="basis_history", resume=str(last), push=False, **settings)}, str(base))

    clusters = PromptClusters({"a": 0, "b": 1}, centroids=np.eye(2, 3, dtype=np.float32), provenance={"encoder": "e"})
    clusters.push_to_hub("alice/clusters", private=True)
    codes, digests = train_by_recipe(folder, base)
    outcome = {
        "generated": generated,
        "resumed_from": json.loads((last / "trainer_state.json").read_text())["global_step"],
        "clusters": [clusters.digest, PromptClusters.load("alice/clusters").digest],
        "table": digests,
        "codes": codes,
    }
    print("\n" + json.dumps(outcome))


if __name__ == "__main__":
    main()
