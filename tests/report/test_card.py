"""The card: metadata that huggingface_hub reads back, every fact in the text, no secret."""

import inspect
import json
import re
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard, metadata_load

from basis_rl.baselines import BASELINES
from basis_rl.report.card import Artefact, License, RunFacts, is_hub_id, load_facts, model_card, save_facts
from basis_rl.report.citations import citations, papers
from basis_rl.report.results import read_results
from basis_rl.run.redact import redact, redact_command
from tests.support.hub_endpoint import check_card
from tests.support.tiny import named_baseline, sums

FACTS = RunFacts(
    model_name="mine",
    hub_model_id="alice/mine",
    base_model="Qwen/Qwen3-4B",
    base_on_hub=True,
    license=License(id="other", name="qwen", link="https://example.org/LICENSE"),
    datasets=["open-r1/DAPO-Math-17k-Processed"],
    data="17,000 problems",
    baseline="basis",
    baseline_parameters={"weighting": "unb", "smoothing": "0.5"},
    artefacts=[Artefact(kind="value table", source="alice/table", sha256="ab" * 32, provenance={"num_rollouts": 32})],
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
    return read_results(tmp_path)


def test_metadata_is_read_back_as_it_was_meant(results, tmp_path):
    card = model_card(FACTS, results, curves="training.png")
    card.save(tmp_path / "README.md")
    check_card(str(card))
    raw = metadata_load(tmp_path / "README.md")
    assert "licence" not in raw
    assert (raw["license"], raw["license_name"], raw["license_link"]) == ("other", "qwen", FACTS.license.link)
    assert raw["metrics"] == ["accuracy"]
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.base_model, data.library_name, data.pipeline_tag) == (
        FACTS.base_model,
        "transformers",
        "text-generation",
    )
    assert data.datasets == FACTS.datasets
    found = {result.metric_name: result for result in data.eval_results}
    assert set(found) == {"avg@16", "pass@16"}, "the base model's results are not this model's"
    assert found["avg@16"].metric_value == 0.6
    assert found["avg@16"].dataset_type == "a/b"
    assert found["avg@16"].metric_args["interval"] == pytest.approx([0.55, 0.65])
    assert found["avg@16"].metric_args["max_tokens"] == 4096


def test_every_fact_is_in_the_text(results):
    text = model_card(FACTS, results, curves="training.png").text
    facts = ["51,200", "weighting = unb", "alice/table", "ab" * 32, "num_rollouts 32", FACTS.reward, "8 x H200", "7"]
    facts += [FACTS.recipe, FACTS.command, "training.png", "trl 1.16.0", "0.250, 0.750", "1e-06, constant", "17,000"]
    facts += [papers()["basis"], papers()["gspo"], papers()["trl"], "## Limitations"]
    rows = [line for line in text.splitlines() if line.startswith("| aime24")]
    assert [[cell.strip() for cell in row.split("|")][2:5] for row in rows] == [
        ["Qwen/Qwen3-4B (base)", "avg@16", "40.0"],
        ["**mine**", "avg@16", "60.0"],
        ["Qwen/Qwen3-4B (base)", "pass@16", "95.0"],
        ["**mine**", "pass@16", "95.0"],
    ]
    for row in rows:
        assert all(text in row for text in ("30", "16", "0.6, top-p 0.95", "4,096", "12.5", " to ")), row
    for fact in facts:
        assert fact in text, fact
    assert [row.split("|")[5].strip() for row in rows[:2]] == ["35.0 to 45.0", "55.0 to 65.0"]
    given = {"num_rollouts": 32, "date": None, "note": "", "generation_kwargs": "{}", "seed": 0}
    made = model_card(replace(FACTS, artefacts=[replace(FACTS.artefacts[0], provenance=given)])).text
    assert "Made with: num_rollouts 32, seed 0.\n" in made


def test_a_name_is_one_of_the_hub_unless_there_is_such_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [is_hub_id(name) for name in ("a/b", "a", "a/b/c", "/a/b", "a/b c")] == [True, False, False, False, False]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").touch()
    assert not is_hub_id("a/b")


def test_a_single_rollout_has_neither_pass_nor_majority(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"math500": {**entry(0.5, 1), "maj@k": {}}}))
    (result,) = read_results(tmp_path)
    assert (result.metric, result.rollouts, result.is_base) == ("avg@1", 1, False)


def columns(text):
    """For each table of a Markdown text, in how many columns its lines fall."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.M)
    return [{len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()} for block in blocks]


def test_a_bar_in_a_fact_stays_in_its_cell(results):
    odd = {
        "reward": "a|b",
        "hardware": "8 x |H200|",
        "settings": {"x|y": "1|2"},
        "model_name": "m|n",
        "baseline": "b|c",
    }
    text = model_card(replace(FACTS, **odd), results).text
    assert columns(text) == [{11}, {3}]
    for cell in ("**m\\|n**", "a\\|b", "8 x \\|H200\\|", "x\\|y | 1\\|2", "`b\\|c`"):
        assert cell in text, cell


def test_what_is_not_known_is_said_and_left_out_of_the_metadata():
    facts = RunFacts(**{**vars(FACTS), "license": None, "base_on_hub": False, "step": 40, "hub_model_id": None})
    card = model_card(facts)
    check_card(str(card))
    raw = card.data.to_dict()
    assert not {"license", "base_model", "metrics", "model-index"} & set(raw)
    for text in ("License: not known", "step 40 of 100", "Not evaluated"):
        assert text in card.text
    assert "pipeline(" not in card.text


def test_facts_survive_the_file(tmp_path):
    save_facts(FACTS, tmp_path)
    assert str(model_card(load_facts(tmp_path))) == str(model_card(FACTS))
    with pytest.raises(ValueError, match=r"no run\.json"):
        load_facts(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text('{"license": null, "artefacts": [], "reward_curve": null, "odd": 1}')
    with pytest.raises(ValueError, match="another version"):
        load_facts(tmp_path)


def test_other_files_named_results_are_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"aime24": {"accuracy": 1}}')
    with pytest.raises(ValueError, match=r"not the results\.json of an evaluation"):
        read_results(tmp_path)


def test_every_baseline_has_its_paper_and_tells_its_parameters():
    for name, cls in BASELINES.items():
        assert len(citations(name)) == 2, name
        baseline = named_baseline(name, sums())
        assert set(baseline.parameters) == set(inspect.signature(cls).parameters), name
    assert citations("MyBaseline") == [papers()["trl"]]
    assert len(citations("grpo", "grpo")) == 2


def test_secrets_are_left_out_and_special_tokens_are_not():
    token = "hf_" + "aB3" * 10
    given = {
        "hub_token": token,
        "eos_token": "<eos>",
        "max_tokens": 5,
        "model_init_kwargs": {"token": "x", "dtype": "float32"},
        "reward_kwargs": '{"api_key": "x", "timeout": 3}',
        "vllm_server_base_url": "http://alice:secret@host:8000",
        "note": f"used {token} here",
        "weights": [1.0, 2.0],
    }
    shown = redact(given)
    assert token not in str(shown)
    assert "secret" not in str(shown)
    assert "hub_token" not in shown
    assert shown["model_init_kwargs"] == {"dtype": "float32"}
    assert json.loads(shown["reward_kwargs"]) == {"timeout": 3}
    assert {key: shown[key] for key in ("eos_token", "max_tokens", "weights")} == {
        "eos_token": "<eos>",
        "max_tokens": 5,
        "weights": [1.0, 2.0],
    }
    hidden = redact_command(['--model_init_kwargs={"token": "abc", "dtype": "bf16"}'])
    assert hidden == ['--model_init_kwargs={"dtype": "bf16"}']
    command = redact_command(["r.yaml", "--hub_token", "abc", "--api-key=def", "--seed", "3"])
    assert command == ["r.yaml", "--hub_token", "<hidden>", "--api-key=<hidden>", "--seed", "3"]
