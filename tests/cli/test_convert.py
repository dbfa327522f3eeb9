"""`basis-rl convert`: what an older version wrote, by prompts' texts, is what this version would have written."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from basis_rl.cli.convert import IdMap, _renamed
from basis_rl.cli.main import main
from basis_rl.cli.values import Job
from basis_rl.clusters import PromptClusters
from basis_rl.data import DataArguments, load_prompts, prompt_id
from basis_rl.evaluation.rollouts import read_rollouts
from basis_rl.evaluation.runner import golds_fingerprint
from basis_rl.recipe.file import parse_recipe
from basis_rl.run.checkpoint import finish
from basis_rl.trainer.state import dataset_identity
from basis_rl.values import ValueTable
from tests.cli.test_eval import evaluate
from tests.support.served import save_model

ROWS = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(16)]
TWIN = {"question": "3 + 1 =", "answer": "5"}


@pytest.fixture
def recipe(recipe, tmp_path):
    """Recipes on a file of problems, with a table in ``tmp_path/values``."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    own = {"dataset_name": str(tmp_path / "rows.jsonl"), "dataset_kwargs": None}
    return lambda **changes: recipe(**{**own, **changes})


BASIS = {"baseline": "basis", "objective": None, "num_generations": 1}


def add_a_twin(tmp_path):
    """Another row with the text of an earlier one, which an older version left out."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*ROWS[:8], TWIN, *ROWS[8:]])))


def older_metadata(folder):
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata.pop("id_scheme") == 2
    return metadata


def make_older_artefact(folder, name, old):
    rows = pq.read_table(folder / name)
    renamed = pa.array([old[each] for each in rows["prompt_id"].to_pylist()])
    pq.write_table(rows.set_column(0, "prompt_id", renamed), folder / name)
    (folder / "metadata.json").write_text(json.dumps(older_metadata(folder)))


def make_older_table(folder, path):
    """The table as the version before wrote it."""
    job, old = Job(parse_recipe([path])), IdMap(parse_recipe([path])).old
    make_older_artefact(folder, "rewards.parquet", old)
    dataset = job.plan.dataset.map(lambda row: {"prompt_id": old[row["prompt_id"]]})
    job.plan.__dict__["dataset"] = dataset
    metadata = json.loads((folder / "metadata.json").read_text())
    metadata["provenance"] |= {"dataset": job.plan.identity(job.config, job.tokenizer, "")["dataset"]}
    del metadata["provenance"]["id_scheme"], metadata["provenance"]["template_day"]
    (folder / "metadata.json").write_text(json.dumps(metadata))


def test_a_table_is_what_it_would_be_today(recipe, tmp_path, capsys):
    folder = tmp_path / "tables" / "values"
    path = recipe(**BASIS, baseline_kwargs={"values": str(folder)})
    assert main(["values", path]) == 0
    before = ValueTable.load(folder)
    make_older_table(folder, path)
    shutil.copytree(folder, tmp_path / "kept")
    capsys.readouterr()
    for command in ("train", "values"):
        assert main([command, path]) == 2
        told = capsys.readouterr().err
        assert f"The value table '{folder}' was written by an older basis-rl" in told
        assert f"`basis-rl convert {folder} RECIPE`" in told
    assert main(["convert", str(folder)]) == 2
    assert "Name the recipe that it was made with" in capsys.readouterr().err
    for _ in range(2):  # the second time there is nothing to do
        assert main(["convert", str(folder), path]) == 0
        after = ValueTable.load(folder)
        assert (after.digest, after.fingerprints) == (before.digest, before.fingerprints)
        assert after.template_day == before.template_day == before.provenance["date"]
    assert main(["values", path]) == 0
    assert "This table already exists" in capsys.readouterr().out
    assert main(["train", path]) == 0
    add_a_twin(tmp_path)
    assert main(["convert", str(tmp_path / "kept"), path]) == 0
    assert Job(parse_recipe([path])).finished() is None, "the new row has no rewards yet"
    assert ValueTable.load(tmp_path / "kept").digest == before.digest, "the rewards are those of the first row"


def test_a_codebook_and_the_prompts_of_another_recipe(recipe, tmp_path, capsys):
    path, folder = recipe(), tmp_path / "book"
    new = load_prompts(DataArguments(str(tmp_path / "rows.jsonl"), prompt_template="{prompt}"), conversational=False)
    old = {row["prompt_id"]: prompt_id(row["prompt"]) for row in new}
    whole = PromptClusters({name: i % 3 for i, name in enumerate(old)}, provenance={"encoder": "e"})
    whole.save(folder)
    make_older_artefact(folder, "clusters.parquet", old)
    with pytest.raises(ValueError, match=r"The prompt codebook .* older .*`basis-rl convert .*book RECIPE`"):
        PromptClusters.load(folder)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS[1:])))
    assert main(["convert", str(folder), path]) == 2
    assert "1 of 16 prompts of the prompt codebook" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    assert main(["convert", str(folder), path]) == 0
    again = PromptClusters.load(folder)
    assert (again.assignments, again.provenance) == (whole.assignments, whole.provenance)
    older = tmp_path / "own"
    whole.save(older)
    (older / "metadata.json").write_text(json.dumps(older_metadata(older)))
    assert main(["convert", str(older), "--own_ids"]) == 0
    assert PromptClusters.load(older).assignments == whole.assignments
    assert main(["convert", str(tmp_path)]) == 2
    assert "holds no value table, prompt codebook, checkpoint or evaluation" in capsys.readouterr().err


def states(folder):
    return {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("*_*.pt"))}


def make_older_checkpoint(folder, problems):
    for path in (folder / "baseline_state.pt", *folder.glob("phase_*.pt")):
        torch.save(_renamed(torch.load(path, weights_only=True), problems.old), path)
    content = torch.load(folder / "baseline_state.pt", weights_only=True)
    assert content.pop("id_scheme") == 2
    content["dataset"] = dataset_identity([problems.old[name] for name in problems.trained])
    torch.save(content, folder / "baseline_state.pt")
    settings = json.loads((folder / "run_settings.json").read_text())
    settings["data"] = {"dataset": content["dataset"]}
    (folder / "run_settings.json").write_text(json.dumps(settings))
    finish(folder)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_checkpoint_is_what_it_would_be_today_and_resumes(recipe, tmp_path, capsys):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "baseline": "basis_history"}
    path = recipe(**saving, prompt_sampler="variance", seed=1)
    assert main(["train", path]) == 0
    run = tmp_path / "out"
    problems = IdMap(parse_recipe([path]))
    folder = run / "checkpoint-1"
    before, weights = states(folder), (folder / "model.safetensors").read_bytes()
    for each in (folder, run / "checkpoint-2"):
        make_older_checkpoint(each, problems)
    assert not same(states(folder)["baseline_state.pt"], before["baseline_state.pt"])
    shutil.copytree(run, tmp_path / "kept")
    capsys.readouterr()
    resumed = ["train", path, "--resume_from_checkpoint", str(folder)]
    assert main(resumed) == 2
    assert f"'{folder}' was written by an older basis-rl" in (told := capsys.readouterr().err)
    assert f"`basis-rl convert {folder} RECIPE`" in told
    # As a conversion leaves it that is killed before the new folder has the name of the old one.
    folder.rename(run / ".checkpoint-1.old")
    assert main(["convert", str(run)]) == 0
    assert capsys.readouterr().out.count("Converted the checkpoint") == 2
    assert same(states(folder), before)
    assert (folder / "model.safetensors").read_bytes() == weights
    assert not list(run.glob(".checkpoint*"))
    assert main(resumed) == 0
    add_a_twin(tmp_path)
    assert main(["convert", str(tmp_path / "kept" / "checkpoint-1"), path]) == 2
    assert "or only on the first of several rows with one text" in capsys.readouterr().err
    (tmp_path / "kept" / "checkpoint-1" / "scheduler.pt").write_bytes(b"")
    assert main(["convert", str(tmp_path / "kept"), path]) == 2
    assert "is damaged (scheduler.pt has 0 bytes" in capsys.readouterr().err


def make_older_evaluation(folder, old):
    kept = read_rollouts(folder / "rows.jsonl")
    lines = [json.dumps({**vars(row), "prompt_id": old[name]}) for name, rows in kept.items() for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    settings = json.loads((folder / "rows.settings.json").read_text())
    assert settings.pop("id_scheme") == 2
    golds = ((old[name], kept[name][0].gold) for name in old if name in kept)
    (folder / "rows.settings.json").write_text(json.dumps({**settings, "problems": golds_fingerprint(golds)}))


def test_an_evaluation_is_what_it_would_be_today(tmp_path, capsys):
    model, data, folder = save_model(tmp_path / "model", tied=False), tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text("\n".join(map(json.dumps, ROWS[:6])))
    assert evaluate(model, data, folder, "--num_rollouts", 2, "--limit", 4) == 0
    before = read_rollouts(folder / "rows.jsonl")
    settings = json.loads((folder / "rows.settings.json").read_text())
    rows = load_prompts(DataArguments(str(data), prompt_template="{prompt}"), conversational=False)
    make_older_evaluation(folder, {row["prompt_id"]: prompt_id(row["prompt"]) for row in rows})
    older = (folder / "rows.settings.json").read_text()
    shutil.copytree(folder, tmp_path / "half")
    again = (model, data, folder, "--num_rollouts", 2, "--limit", 4)
    compared = (model, data, tmp_path / "new", "--num_rollouts", 2, "--limit", 4, "--compare", folder)
    for given in (again, compared):
        capsys.readouterr()
        assert evaluate(*given) == 2
        assert "written by an older basis-rl" in (told := capsys.readouterr().err)
        assert f"`basis-rl convert {folder}`" in told
    for _ in range(2):
        assert main(["convert", str(folder)]) == 0
        assert read_rollouts(folder / "rows.jsonl") == before
        assert json.loads((folder / "rows.settings.json").read_text()) == settings
        # As a conversion leaves it that is killed between its two files.
        (folder / "rows.settings.json").write_text(older)
    assert main(["convert", str(folder)]) == 0
    assert evaluate(*again) == 0
    assert "4 of 4 problems have their rollouts already" in capsys.readouterr().out
    lines = (tmp_path / "half" / "rows.jsonl").read_text().splitlines(True)
    (tmp_path / "half" / "rows.jsonl").write_text("".join(lines[:4]))
    assert main(["convert", str(tmp_path / "half")]) == 2
    assert "it is not finished" in capsys.readouterr().err
