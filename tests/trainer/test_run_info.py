"""What a run tells about itself: every fact from its own source, secrets and folders left out."""

import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch
import yaml
from transformers import BitsAndBytesConfig

from basis_rl.baselines import build_baseline
from basis_rl.clusters import PromptClusters
from basis_rl.report.runs import Run
from basis_rl.run.record import load_run_info, save_run_info
from basis_rl.samplers import Frontier
from basis_rl.trainer.config import BasisConfig, changed_settings, without_secrets
from basis_rl.trainer.publish import Origin, run_info
from basis_rl.values import ValueTable
from tests.support.tiny import Tokenwise, parity_reward, sums

TOKEN = "hf_" + "aB3" * 8


def config(tmp_path, **settings):
    given = {"num_generations": 4, "per_device_train_batch_size": 8, "steps_per_generation": 2, "use_cpu": True}
    return BasisConfig(str(tmp_path / "out"), report_to="none", bf16=False, **{**given, **settings})


def facts(tmp_path, origin=None, baseline=None, log=(), step=3, max_steps=5, given=None, **settings):
    """The facts of a run with these settings; `given` are further attributes of the trainer, or arguments."""
    known = {
        "args": config(tmp_path, **settings),
        "state": SimpleNamespace(log_history=list(log), global_step=step, max_steps=max_steps),
        "origin": origin or Origin("owner/base", "dapo"),
        "accelerator": SimpleNamespace(num_processes=2, state=SimpleNamespace()),
        "model": torch.nn.Linear(1, 1),
        "baseline": baseline or build_baseline("rloo"),
        "sampler": Frontier(hard=2.0),
        "functions": [parity_reward],
        "train_dataset": sums(6),
        "spending": SimpleNamespace(rollouts=48),
        "stop_on_signal": SimpleNamespace(stopped=False),
        "hub_model_id": None,
    }
    given = given or {}
    arguments = {name: given[name] for name in ("dataset_name", "tags") if name in given}
    return run_info(SimpleNamespace(**{**known, **given}), "m", **arguments)


def test_each_fact_is_from_its_own_source(tmp_path):
    log = [{"reward": None}, {"reward": 0.25}, {"loss": 1.0}, {"reward": 0.5}, {"reward": 0.75}]
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "learning_rate": 3e-6, "seed": 7}
    origin = Origin("owner/base", "gspo", commit="abc", license="mit", command="c")
    found = facts(tmp_path, origin, log=log, given={"tags": {"b", "a"}}, **settings)
    sampler = (found.sampler, found.sampler_parameters["hard"], found.sampler_parameters["easy"])
    assert sampler == ("frontier", "2.0", "0.5")
    assert (found.step, found.max_steps, found.rollouts, found.seed) == (3, 5, 48, 7)
    assert found.reward_curve == (0.25, 0.75)
    assert (found.baseline, found.objective, found.reward) == ("rloo", "gspo", "parity_reward")
    assert (found.base_model, found.base_on_hub, found.base_revision) == ("owner/base", True, "abc")
    assert (found.license["license"], found.command, found.library) == ("mit", "c", "transformers")
    assert found.tags == ["generated_from_trainer", "a", "b"]
    assert found.compared == {
        "num_generations": 4,
        "rollouts_per_batch": 32,
        "rollouts_per_update": 8 * 2 * 2,
        "learning_rate": 3e-6,
    }
    assert found.settings["generation batch"] == "8 prompts x 4 rollouts"
    assert found.settings["learning rate"] == "3e-06, linear"
    assert found.settings["precision"] == "fp32"
    assert found.settings["KL to the reference"] == "none"
    assert found.data == "6 problems"
    assert found.hardware.startswith("2 process(es) on a CPU")
    assert {"Python", "basis-rl", "trl", "torch"} <= set(found.versions)
    assert not {"vllm", "deepspeed"} & set(found.versions)
    for settings, shown in (
        ({}, "k3 in the loss, coefficient 0.5, times the ratio (use_bias_correction_kl)"),
        ({"use_bias_correction_kl": False}, "k3 in the loss, coefficient 0.5, not times the ratio"),
        ({"kl_placement": "reward"}, "k1 in the reward, coefficient 0.5"),
    ):
        assert facts(tmp_path, beta=0.5, **settings).settings["KL to the reference"] == shown


def test_a_run_is_finished_when_it_has_come_to_its_end_unless_a_signal_ended_it(tmp_path):
    end = [{"step": 3, "reward": 1.0}, {"step": 3, "train_runtime": 3.0}]
    assert not facts(tmp_path, log=end[:1]).finished
    assert facts(tmp_path, log=end).finished
    assert not facts(tmp_path, log=end, given={"stop_on_signal": SimpleNamespace(stopped=True)}).finished
    continued = [{"step": 100, "train_runtime": 3.0}, {"step": 300, "reward": 1.0}]
    assert not facts(tmp_path, log=continued, step=300, max_steps=1000).finished
    assert facts(tmp_path, log=continued, step=300, max_steps=300).finished
    assert facts(tmp_path, step=9, max_steps=0).max_steps == 9


def test_where_model_and_data_are_from(tmp_path):
    local = tmp_path / "deep" / "mine"
    local.mkdir(parents=True)
    (local / "README.md").write_text("---\nlicense: other\nlicense_name: n\nlicense_link: LICENSE\n---\n")
    found = facts(tmp_path, Origin(str(local), "dapo"))
    assert (found.base_model, found.base_on_hub, found.datasets) == ("mine", False, [])
    assert found.license == {"license": "other", "license_name": "n", "license_link": None}
    assert facts(tmp_path, Origin("", "dapo")).base_model == "a model built in memory"
    assert facts(tmp_path, Origin("no/where", "dapo")).license is None
    (local / "README.md").write_text("no front matter")
    assert Origin(str(local), "dapo").found_license is None
    of_hub = facts(tmp_path, Origin("owner/base", "dapo", dataset_name="a/b"))
    assert (of_hub.datasets, of_hub.data) == (["a/b"], "6 problems of a/b")
    of_file = facts(
        tmp_path, Origin("owner/base", "dapo", dataset_name="a/b"), given={"dataset_name": "/home/me/x.json"}
    )
    assert (of_file.datasets, of_file.data) == ([], "6 problems of x.json")


def test_a_license_file_of_the_hub_becomes_its_address(monkeypatch, tmp_path):
    card = tmp_path / "README.md"
    asked = []

    def download(model, name, local_files_only):
        asked.append((model, name, local_files_only))
        return str(card)

    monkeypatch.setattr("basis_rl.trainer.publish.hf_hub_download", download)
    for link, shown in (
        ("LICENSE", "https://huggingface.co/o/m/blob/main/LICENSE"),
        ("https://x.y/z", "https://x.y/z"),
    ):
        card.write_text(f"---\nlicense: other\nlicense_link: {link}\n---\n")
        assert Origin("o/m", "dapo", online=True).found_license["license_link"] == shown
    card.write_text("---\ntags: [a]\n---\n")
    assert Origin("o/m", "dapo").found_license is None
    assert asked == [("o/m", "README.md", False)] * 2 + [("o/m", "README.md", True)]


def test_what_the_baseline_was_given_is_named_without_its_folder(tmp_path):
    table = ValueTable.from_rewards(
        {"a": [1.0, 0.0], "b": [1.0]}, provenance={"hub_token": TOKEN, "reward": f"r {TOKEN}", "list": [1]}
    )
    table.source = "/home/me/tables/t"
    (artefact,) = facts(tmp_path, baseline=build_baseline("basis", values=table)).artefacts
    assert (artefact["kind"], artefact["source"], artefact["sha256"]) == ("value table", "t", table.digest)
    assert artefact["rollouts"] == 3
    assert artefact["provenance"] == {"reward": "r <hidden>"}
    table.provenance["rollouts"] = 40
    made = facts(tmp_path, baseline=build_baseline("basis", values=table))
    assert made.artefacts[0]["rollouts"] == 40
    assert made.baseline_parameters["values"] == "t"
    book = PromptClusters({"a": 1})
    found = facts(tmp_path, baseline=build_baseline("bv_blend", clusters=book))
    assert [(each["kind"], each["rollouts"], each["sha256"]) for each in found.artefacts] == [
        ("prompt codebook", 0, book.digest)
    ]
    assert facts(tmp_path, baseline=Tokenwise()).baseline == "Tokenwise"
    own = SimpleNamespace(parameters={"chance": parity_reward})
    assert facts(tmp_path, given={"sampler": own}).sampler_parameters == {"chance": "<function parity_reward>"}


def test_a_comparison_reads_what_the_card_is_made_of(tmp_path):
    table = ValueTable.from_rewards({"a": [1.0, 0.0]})
    save_run_info(
        facts(tmp_path, baseline=build_baseline("basis", values=table), log=[{"step": 3, "train_runtime": 1.0}]),
        tmp_path,
    )
    record = json.loads((tmp_path / "run.json").read_text())
    recipe = {"baseline": "my:Own", "objective": None, "lr": 1}
    read = Run(Path("r"), pd.DataFrame([{"num_rollouts": 1}]), recipe, record)
    assert read.settings == {**record["compared"], "baseline": "my:Own", "objective": "dapo", "seed": 42, "lr": 1}
    assert read.finished
    assert (read.table["sha256"], read.table["rollouts"]) == (table.digest, 2)
    assert load_run_info(tmp_path).artefacts[0]["sha256"] == table.digest


def test_settings_that_are_shown_are_those_that_differ_and_no_secrets(tmp_path):
    args = config(
        tmp_path, hub_token=TOKEN, learning_rate=1e-4, model_init_kwargs={"token": "x", "dtype": torch.float32}, seed=42
    )
    shown = changed_settings(args)
    assert shown["learning_rate"] == 1e-4
    assert shown["model_init_kwargs"] == {"dtype": "float32"}
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    given = {"quantization_config": quantized, "dtypes": [torch.float16, {1: torch.float32}], "max_memory": {0: "8GB"}}
    shown = yaml.safe_load(yaml.safe_dump(changed_settings(config(tmp_path, model_init_kwargs=given))))
    assert shown["model_init_kwargs"]["quantization_config"]["bnb_4bit_compute_dtype"] == "bfloat16"
    assert shown["model_init_kwargs"]["dtypes"] == ["float16", {1: "float32"}]
    assert shown["model_init_kwargs"]["max_memory"] == {0: "8GB"}
    assert shown["output_dir"] == "out"
    assert not {"hub_token", "seed", "temperature"} & set(shown)
    assert yaml.safe_load(facts(tmp_path, learning_rate=1e-4).recipe)["learning_rate"] == 1e-4
    assert facts(tmp_path, Origin("a/b", "dapo", recipe="x: 1\n")).recipe == "x: 1\n"
    public = without_secrets(args)
    assert (public.hub_token, args.hub_token) == (None, TOKEN)
    assert public.model_init_kwargs == {"dtype": torch.float32}
    assert json.loads(args.to_json_string())["model_init_kwargs"] == {"dtype": "float32"}
    assert public.learning_rate == 1e-4


def test_the_record_of_a_loaded_model(tmp_path):
    args = config(tmp_path, push_to_hub=True, model_license="mit", loss_type="grpo")
    record = Origin.of(SimpleNamespace(_name_or_path="o/m", _commit_hash="c0"), args, "grpo")
    assert (record.model, record.objective, record.commit, record.online) == ("o/m", "grpo", "c0", True)
    assert record.found_license == {"license": "mit"}
    assert record.revision == "c0"
    assert Origin.of(SimpleNamespace(), args, "gspo").objective == "gspo"
    assert Origin.of(SimpleNamespace(), args, "gspo").revision is None
