"""The card: metadata that huggingface_hub reads back, every fact in the text, no secret."""

import inspect
import json
import re
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard, metadata_load

from basis_rl.baselines import BASELINES
from basis_rl.report.card import citations, model_card, papers, results_of
from basis_rl.run.record import RunInfo, is_hub_id, load_run_info, save_run_info
from tests.support.hub_endpoint import check_card
from tests.support.tiny import named_baseline, sums

INFO = RunInfo(
    model_name="mine",
    hub_model_id="alice/mine",
    base_model="Qwen/Qwen3-4B",
    base_on_hub=True,
    license={"license": "other", "license_name": "qwen", "license_link": "https://example.org/LICENSE"},
    datasets=["open-r1/DAPO-Math-17k-Processed"],
    data="17,000 problems",
    baseline="basis",
    baseline_parameters={"weighting": "unb", "smoothing": "0.5"},
    artefacts=[
        {"kind": "value table", "source": "alice/table", "sha256": "ab" * 32, "provenance": {"num_rollouts": 32}}
    ],
    objective="gspo",
    reward="math_verify[math-verify 0.9.0]",
    settings={"learning rate": "1e-06, constant"},
    step=100,
    max_steps=100,
    rollouts=51_200,
    reward_curve=(0.25, 0.75),
    seed=7,
    hardware="8 x H200",
    versions={"trl": "1.16.0"},
    recipe="baseline: basis\nseed: 7\n",
    command="basis-rl train recipe.yaml",
    tags=["trl", "basis-rl"],
)


def entry(value, samples):
    numbers = {"value": value, "low": value - 0.05, "high": value + 0.05}
    more = {"pass@k": {"1": numbers, "8": {**numbers, "value": 0.9}, "16": {**numbers, "value": 0.95}}}
    settings = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 4096, "source": {"dataset_name": "a/b"}}
    shared = {"num_problems": 30, "num_rollouts": samples, "truncated": 0.125, "settings": settings}
    return {**shared, **more, f"avg@{samples}": numbers}


@pytest.fixture
def results(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"aime24": entry(0.6, 16)}))
    (tmp_path / "base_results.json").write_text(json.dumps({"aime24": entry(0.4, 16)}))
    return [results_of(tmp_path / name) for name in ("results.json", "base_results.json")]


def test_metadata_is_read_back_as_it_was_meant(results, tmp_path):
    card = model_card(INFO, *results, curves="training.png")
    card.save(tmp_path / "README.md")
    check_card(str(card))
    raw = metadata_load(tmp_path / "README.md")
    assert "licence" not in raw
    assert (raw["license"], raw["license_name"], raw["license_link"]) == tuple(INFO.license.values())
    assert raw["metrics"] == ["accuracy"]
    data = ModelCard.load(tmp_path / "README.md").data
    found = (data.base_model, data.library_name, data.pipeline_tag)
    assert found == (INFO.base_model, "transformers", "text-generation")
    assert data.datasets == INFO.datasets
    found = {result.metric_name: result for result in data.eval_results}
    assert set(found) == {"avg@16", "pass@16"}, "the base model's results are not this model's"
    assert found["avg@16"].metric_value == 0.6
    assert found["avg@16"].dataset_type == "a/b"
    assert found["avg@16"].metric_args["interval"] == pytest.approx([0.55, 0.65])
    assert found["avg@16"].metric_args["max_tokens"] == 4096


def test_every_fact_is_in_the_text(results):
    text = model_card(INFO, *results, curves="training.png").text
    facts = ["51,200", "weighting = unb", "alice/table", "ab" * 32, "num_rollouts 32", INFO.reward, "8 x H200", "7"]
    facts += [INFO.recipe, INFO.command, "training.png", "trl 1.16.0", "0.250, 0.750", "1e-06, constant", "17,000"]
    facts += [papers()["basis"], papers()["gspo"], papers()["trl"], "## Limitations"]
    rows = [line for line in text.splitlines() if line.startswith("| aime24")]
    names = ["Qwen/Qwen3-4B (base)", "**mine**"] * 2
    cells = [[cell.strip() for cell in row.split("|")][2:5] for row in rows]
    assert [name for name, _, _ in cells] == names
    assert [cell for _, *cell in cells] == [["avg@16", "40.0"], ["avg@16", "60.0"], *[["pass@16", "95.0"]] * 2]
    for row in rows:
        assert all(text in row for text in ("30", "16", "0.6, top-p 0.95", "4,096", "12.5", " to ")), row
    for fact in facts:
        assert fact in text, fact
    assert [row.split("|")[5].strip() for row in rows[:2]] == ["35.0 to 45.0", "55.0 to 65.0"]
    given = {"num_rollouts": 32, "date": None, "note": "", "generation_kwargs": "{}", "seed": 0}
    made = model_card(replace(INFO, artefacts=[{**INFO.artefacts[0], "provenance": given}])).text
    assert "Made with: num_rollouts 32, seed 0.\n" in made


def test_a_name_is_one_of_the_hub_unless_there_is_such_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [is_hub_id(name) for name in ("a/b", "a", "a/b/c", "/a/b", "./b", "a/b c")] == [True, *[False] * 5]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").touch()
    assert not is_hub_id("a/b")


def test_a_single_rollout_has_neither_pass_nor_majority(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"math500": {**entry(0.5, 1), "maj@k": {}}}))
    (result,) = results_of(tmp_path / "results.json")
    assert (result.metric_name, result.metric_args["rollouts"]) == ("avg@1", 1)


def test_a_bar_in_a_fact_stays_in_its_cell(results):
    text = model_card(replace(INFO, reward="a|b", settings={"x|y": "1|2"}, model_name="m|n"), *results).text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert [{len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()} for table in tables] == [{11}, {3}]
    assert all(cell in text for cell in ("**m\\|n**", "a\\|b", "x\\|y | 1\\|2"))


def test_what_is_not_known_is_said_and_left_out_of_the_metadata():
    facts = RunInfo(**{**vars(INFO), "license": None, "base_on_hub": False, "step": 40, "hub_model_id": None})
    card = model_card(facts)
    check_card(str(card))
    raw = card.data.to_dict()
    assert not {"license", "base_model", "metrics", "model-index"} & set(raw)
    for text in ("License: not known", "step 40 of 100", "Not evaluated"):
        assert text in card.text
    assert "pipeline(" not in card.text


def test_facts_survive_the_file(tmp_path):
    save_run_info(INFO, tmp_path)
    assert str(model_card(load_run_info(tmp_path))) == str(model_card(INFO))
    with pytest.raises(ValueError, match=r"no run\.json"):
        load_run_info(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text('{"license": null, "artefacts": [], "reward_curve": null, "odd": 1}')
    with pytest.raises(ValueError, match="cannot be read"):
        load_run_info(tmp_path)


def test_every_baseline_has_its_paper_and_tells_its_parameters():
    for name, cls in BASELINES.items():
        assert len(citations(name)) == 2, name
        baseline = named_baseline(name, sums())
        assert set(baseline.parameters) == set(inspect.signature(cls).parameters), name
    assert citations("MyBaseline") == [papers()["trl"]]
    assert len(citations("grpo", "grpo")) == 2
