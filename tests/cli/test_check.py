"""`basis-rl check`: what it says of a launch, a table, a server and the Hub, and what it warns of."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from basis_rl.cli.check_sections import hub
from basis_rl.cli.main import main
from basis_rl.clusters import PromptClusters
from basis_rl.data import load_prompts
from basis_rl.estimate.footprint import Launch, planned, read_launch
from basis_rl.recipe.file import parse_recipe
from basis_rl.values import ValueTable
from tests.support.fake_judge import JudgeServer
from tests.support.fake_vllm import FakeServer
from tests.support.tiny import config

ROOT = Path(__file__).resolve().parents[2]
OWN = {
    "baseline": "none",
    "objective": None,
    "num_generations": 1,
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    "learning_rate": None,
    "gradient_checkpointing": None,
    "save_strategy": None,
    "values_num_rollouts": None,
    "use_cpu": None,
    "bf16": None,
    "reward_funcs": ["tests.support.tiny.parity_reward"],
}

CPU = {"use_cpu": True, "bf16": False}


@pytest.fixture
def check(recipe, capsys):
    """Checks a recipe with changes and options: exit code, what was printed, warnings, error."""

    def run(*options, **changes):
        capsys.readouterr()
        code = main(["check", recipe(**changes), *options])
        said = capsys.readouterr()
        return code, said.out, re.findall(r"^\d+\. (.*)", said.out, re.M), said.err

    return run


def test_sections_come_in_order_and_the_verdict_last(check):
    code, said, warnings, _ = check()
    assert code == 0
    assert warnings == []
    sections = re.findall(r"^== (.*)", said, re.M)
    assert (sections[0], sections[-1], len(set(sections))) == ("Configuration", "Hub", 10)
    assert said.rstrip().endswith("The recipe is in order.")
    assert "Reward functions and environments read no column." in said
    assert said.count("--- prompt ") == 3
    assert "the problem from column 'question', the gold from 'answer'" in said


def test_the_calls_of_a_judge_are_told_and_one_that_does_not_answer(check):
    with JudgeServer() as server:
        asked = {"base_url": server.url, "model": "m", "behind": "math_verify", "max_retries": 0}
        judge = {"reward_funcs": ["judge"], "reward_kwargs": asked}
        code, said, warnings, error = check(**judge)
        assert (code, warnings) == (0, []), error
        assert f"judge_reward asks m at {server.url} about answers that math_verify_reward rejects" in said
        batch = int(re.search(r"= (\d+) rollouts on", said)[1])
        assert f"At most {batch} calls per generation batch, 16 at a time" in said
        # Whether it answers at all, and what it says of an example.
        assert len(server.requests) == 2
        server.says = lambda question: "I think that it is right."
        assert "ended a trial without a score within the scale" in check(**judge)[2][0]
        server.before = lambda number, body: 401
        assert "does not answer: HTTP 401" in check(**judge)[2][0]


def test_arithmetic_is_that_of_the_launch(check):
    paths = list((ROOT / "accelerate_configs").glob("*.yaml"))
    launched = ["--accelerate_config", str(paths[0]), "--num_processes", "2", "--main_process_port", "29511"]
    _, said, _, _ = check(*launched, per_device_train_batch_size=3)
    assert "12 prompts x 1 rollouts = 12 rollouts on 2 process(es), used for 2 optimizer step(s) of 6" in said
    for path in paths:
        assert read_launch(str(path)).world == yaml.safe_load(path.read_text())["num_processes"]


def test_every_optimizer_step_is_accounted_for(check):
    """The words against a count of what the sampler would do."""
    settings = {"num_generations": 2, "num_iterations": 3, "gradient_accumulation_steps": 2, "max_steps": 12}
    _, said, warnings, _ = check(baseline="rloo", **settings)
    assert warnings == []
    # 2 micro-batches a generation, 3 times over = 6 micro-batches = 3 optimizer steps; 12 steps = 4 generations of 8.
    assert "4 prompts x 2 rollouts = 8 rollouts on 1 process(es), used for 3 optimizer step(s) of 8" in said
    assert "12 optimizer steps = 4 generation batches, 32 rollouts" in said
    problems = int(re.search(r"One epoch: (\d+) problems", said).group(1))
    epochs = 16 / (problems // 4 * 4)
    assert f"each prompt is seen {epochs:.3g} time(s), answered {2 * epochs:.3g} time(s)" in said
    _, _, warnings, _ = check(max_steps=3)
    assert "1.5 generation batches" in warnings[0]


def test_problems_without_a_gold_are_in_no_epoch(check, tmp_path):
    rows = [f'{{"question": "{i} + 1 =", "answer": "{i + 1 if i else ""}"}}' for i in range(9)]
    (tmp_path / "some.jsonl").write_text("\n".join(rows))
    data = {"dataset_name": str(tmp_path / "some.jsonl"), "dataset_kwargs": None, "on_invalid_gold": "drop"}
    code, said, _, error = check(**data, reward_funcs=["math_verify"], max_steps=None, num_train_epochs=1)
    assert code == 0, error
    assert "One epoch: 8 problems = 1 generation batches." in said


def test_where_answers_are_read_is_said_and_some_golds_and_a_box_that_no_prompt_asks_for(check, tmp_path):
    path = tmp_path / "even.jsonl"
    path.write_text("".join(json.dumps({"question": f"Is {i} even?", "answer": i % 2 == 0}) + "\n" for i in range(64)))
    rows = {"dataset_name": str(path), "dataset_kwargs": None, "reward_funcs": ["exact"]}
    _, said, warnings, error = check(**rows, prompt_template="{prompt} Answer in \\boxed{}.")
    assert warnings == [], error
    assert "== Answers\nexact_reward reads the answer from the last \\boxed{}." in said
    assert "--- its gold, in 'solution': True\n" in said
    _, _, warnings, _ = check(**rows)
    assert ["no prompt asks for one" in warning for warning in warnings] == [True]
    elsewhere = {"reward_kwargs": {"answer_in": "last_line"}}
    assert check(**rows, **elsewhere)[2] == []


def test_prompts_are_shown_with_their_golds_and_several_golds_of_one_prompt_are_warned_of(check, tmp_path):
    rows = [f'{{"question": "{i % 9} + 1 =", "answer": "  {i + 1}\\n#"}}' for i in range(12)]
    (tmp_path / "some.jsonl").write_text("\n".join(rows))
    data = {"dataset_name": str(tmp_path / "some.jsonl"), "dataset_kwargs": None, "reward_funcs": ["exact"]}
    code, said, warnings, error = check("--strict", **data)
    assert code == 2, error
    assert re.findall(r"--- its gold, in 'solution': (.*)", said) == ["1 #", "2 #", "3 #"]
    assert said.index("--- prompt 1") < said.index(": 1 #") < said.index("--- prompt 2")
    (odd,) = (warning for warning in warnings if "another gold" in warning)
    assert "3 rows have the prompt of an earlier row" in odd


def test_an_engine_that_the_recipe_asks_for_is_what_is_told(check):
    code, said, _, error = check("--world_size", "2", fsdp=True)
    assert code == 0, error
    assert "Launched as: FSDP on 2 process(es), from fsdp of the recipe." in said


def test_extras_that_are_missing_here_are_warnings(check, monkeypatch):
    monkeypatch.setattr("basis_rl.cli.check_sections.missing_extra", lambda module, what: f"{what} needs {module}.")
    code, _, warnings, error = check("--accelerate_config", "zero3_cpu", "--use_vllm", "true")
    assert code == 0, error
    assert any("use_vllm needs vllm." in warning for warning in warnings)
    assert any("DeepSpeed ZeRO-3 on 2 process(es)" in w and "needs deepspeed." in w for w in warnings)
    _, _, warnings, _ = check()
    assert not any("needs" in warning for warning in warnings)


def test_all_that_is_wrong_is_said_at_once(check):
    wrong = {"temperature": 0.0, "baseline": "rlo", "prompt_column": "no_such", "max_steps": -5}
    code, _, _, error = check(model_name_or_path="no/such/model", **wrong)
    assert code == 2
    mistakes = re.findall(r"^\d\. (.*)", error, re.M)
    said = ["Unknown baseline 'rlo'", "max_steps must", "temperature is 0", "'no/such/model'", "no column 'no_such'"]
    assert all(any(part in mistake for mistake in mistakes) for part in said), error
    assert len(mistakes) == len(said)
    _, _, _, error = check(max_completion_length=4096, **{"max_train_samples": 1})
    assert ["generation batch takes" in error, "context is" in error] == [True, True], error
    code, _, _, error = check("--learnin_rate", "1", bta=0.1, dataset_name="nowhere.csv")
    assert (code, len(re.findall(r"^\d\. ", error, re.M))) == (2, 3), error
    assert "'--learning_rate'" in error


def test_warnings_are_not_failures_unless_strict(check):
    code, said, warnings, _ = check("--gpu_memory", "0.0001", objective="gspo")
    assert code == 0
    assert len(warnings) == 2
    assert "epsilon is 0.2" in warnings[0]
    assert "GiB on each GPU, but a GPU has 0.0 GiB. Shard over more" in warnings[1]
    assert said.rstrip().endswith("with 2 warning(s).")
    code, _, warnings, _ = check("--strict", "--gpu_memory", "80", objective="gspo")
    assert (code, len(warnings)) == (2, 1)
    assert check("--strict")[0] == 0
    for options in ([], ["--accelerate_config", str(ROOT / "accelerate_configs" / "ddp.yaml"), "--world_size", "2"]):
        assert "mostly rounded away" in check(*options, dtype="bfloat16")[2][0]
    config = str(ROOT / "accelerate_configs" / "zero3.yaml")
    assert check("--accelerate_config", config, "--world_size", "2", dtype="bfloat16")[2] == []


def test_room_for_the_checkpoints_is_compared(check, monkeypatch):
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    code, said, warnings, _ = check(**settings)
    assert (code, warnings) == (0, [])
    assert re.search(r"A checkpoint takes about \d\.\d\d GiB; 1 are kept", said)
    monkeypatch.setattr("basis_rl.estimate.report.free_bytes", lambda folder: 1000)
    code, _, warnings, _ = check(**settings)
    assert code == 0
    assert "output_dir has 0.00 GiB of free disk space, but 2 checkpoint(s)" in warnings[0]


def prompt_ids(path):
    with planned(Launch()):  # bf16, which is refused where there is no GPU
        return load_prompts(parse_recipe([path]).data, conversational=True)["prompt_id"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),
        ({"prompt_sampler": "variance"}, "which `prompt_sampler_kwargs: {correct: true}` undoes."),
        ({"prompt_sampler": "dynamic", "num_generations": 2}, "are drawn again, 4 times at most."),
    ],
)
def test_a_sampler_says_what_it_does_to_the_objective(settings, said, check):
    code, out, _, _ = check(**settings)
    assert code == 0
    assert ("== Sampling" in out) == (said is not None)
    assert said is None or said in out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["--accelerate_config", __file__], "is not an accelerate configuration"),
        ({"prompt_sampler": "tests.samplers.test_samplers:Short"}, "'Weighing' has no prompts for generation batch 0"),
    ],
)
def test_what_cannot_be_is_one_message(settings, said, check):
    code, _, _, error = check(**settings) if isinstance(settings, dict) else check(*settings)
    assert code == 2
    assert said in error


def test_a_table_is_announced_then_described(check, recipe, tmp_path):
    path = str(tmp_path / "values")
    changes = {"baseline": "basis", "baseline_kwargs": {"values": path}, "values_num_rollouts": 7}
    code, said, warnings, _ = check(**changes)
    assert code == 0
    problems = int(re.search(r"One epoch: (\d+) problems", said).group(1))
    assert len(warnings) == 1
    assert f"`basis-rl values {recipe(**changes)}`" in warnings[0]
    assert f"{problems} prompts x 7 (--values_num_rollouts) = {7 * problems} rollouts" in said
    ids = prompt_ids(recipe(**changes))
    ValueTable.from_rewards({name: [0.0, 1.0] for name in ids}, provenance={"temperature": 1.0}).save(path)
    code, said, warnings, _ = check(**changes)
    assert (code, warnings) == (0, [])
    assert f"== What the baseline needs\nValue table {path}: {problems} prompts" in said
    assert f"covers {problems} of {problems} training prompts" in said
    assert "temperature 1.0" in said
    code, _, warnings, _ = check("--temperature", "0.5", "--baseline_kwargs.accept_mismatch", "true", **changes)
    assert code == 0
    assert "accept_mismatch allows it: temperature: table 1.0, run 0.5" in warnings[0]
    assert check(baseline="basis", baseline_kwargs={"values": path, "weighting": "vpo"})[0] == 2
    shutil.rmtree(path)
    code, _, _, error = check(baseline="basis", baseline_kwargs={"values": path, "weighting": "vpo"})
    assert code == 2, "its other parameters are checked although the table is missing"
    assert "weighting must be unb or vop or rvg or none" in error


def test_a_table_says_how_many_groups_would_have_no_variance(check, recipe, tmp_path):
    path = str(tmp_path / "values")
    changes = {"baseline": "basis", "baseline_kwargs": {"values": path}}
    ValueTable.from_rewards({name: [0.0] * 8 for name in prompt_ids(recipe(**changes))}).save(path)
    hopeless = re.search(r"^uniform +0\.0\d +100% +(\d+)%", check(**changes)[1], re.M)
    assert int(hopeless[1]) > 90


def test_rollouts_show_groups_from_64_on(check):
    assert "G = 16" not in check("--draw", "63")[1]
    said = check("--draw", "64")[1]
    assert said.count("--- reward ") == 16
    assert "Of 16 prompts, 4 rollouts each" in said


class Scorer(torch.nn.Linear):
    """A reward model."""

    config = SimpleNamespace(_name_or_path="scorer")


def test_a_reward_model_is_left_out_of_what_is_drawn_with_its_weight(check, monkeypatch):
    rewards = [Scorer(1, 1), lambda completions, **columns: [1.0] * len(completions)]
    monkeypatch.setattr("basis_rl.recipe.build.build_rewards", lambda run: rewards)
    code, said, _, error = check("--draw", "2", reward_weights=[5.0, 3.0])
    assert code == 0, error
    assert said.count("--- reward 3, ") == 2


def test_a_codebook_is_announced_then_described(check, recipe, tmp_path):
    path = str(tmp_path / "clusters")
    changes = {"baseline": "bv_blend", "baseline_kwargs": {"clusters": path}}
    code, said, warnings, _ = check(**changes)
    assert code == 0
    assert "`basis-rl clusters " in warnings[0]
    assert "no rollouts" in said
    ids = prompt_ids(recipe(**changes))
    PromptClusters({name: i % 3 for i, name in enumerate(ids)}).save(path)
    code, said, warnings, _ = check(**changes)
    assert (code, warnings) == (0, [])
    assert f"3 clusters. It covers {len(ids)} of {len(ids)} training prompts" in said


def test_the_server_is_asked(check, tiny_path, monkeypatch):
    # The fast tests also run where vLLM is not installed.
    monkeypatch.setattr("basis_rl.cli.check_sections.missing_extra", lambda module, what: None)
    with FakeServer(root="m", max_model_len=4096) as fake:
        vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": fake.url, **CPU}
        assert re.search(r"has the model .*\bm, not .*tiny", check(**vllm)[2][0])
        fake.root = str(tiny_path)
        code, said, warnings, _ = check(**vllm)
        assert (code, warnings) == (0, [])
        assert "has this model and accepts up to 4096 tokens" in said
        _, said, warnings, _ = check(**{**vllm, "vllm_server_base_url": f"{fake.url}, http://127.0.0.1:9"})
        assert f"The server at {fake.url} has this model" in said
        assert len(warnings) == 1
        assert "no vLLM server at http://127.0.0.1:9" in warnings[0]
        lora = {"vllm_lora_sync": "adapter", "use_peft": True, "lora_target_modules": "all-linear"}
        assert "cannot load adapters" in check(**vllm, **lora)[2][0]
        fake.max_model_len = 40
        assert "accepts 40 tokens, but the longest prompt" in check(**vllm)[2][0]
        fake.get = lambda path: ["something else"]
        assert "There is no vLLM server" in check(**vllm)[2][0]
    code, _, warnings, _ = check(**vllm)
    assert code == 0
    assert "There is no vLLM server" in warnings[0]


def test_what_a_stream_will_be_is_said(check, tiny_path, monkeypatch):
    """Prompts, rollouts and tokens in flight, their age, and whether the server has room for them."""
    monkeypatch.setattr("basis_rl.cli.check_sections.missing_extra", lambda module, what: None)
    cache = {"cache_config": {"kv_cache_size_tokens": 1000}, "parallel_config": {"data_parallel_size": 2}}
    with FakeServer(root=str(tiny_path), max_model_len=4096) as fake:
        answers = fake.get
        fake.get = lambda path: {"vllm_config": cache} if path == "/server_info" else answers(path)
        stream = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": fake.url, **CPU}
        stream |= {"rollouts": "stream", "max_staleness": 6, "num_generations": 2}
        code, said, warnings, _ = check(**stream, gradient_accumulation_steps=2)
        assert (code, warnings) == (0, [])
        found = said.split("== Streaming\n")[1].split("\n\n")[0]
        assert "2 generation batch(es) are in flight while one is trained on: 8 prompts, 16 rollouts" in found
        tokens, each, cache_gib = re.search(
            r"([\d,]+) tokens of (\d+) per rollout at most, ([\d.]+) GiB", found
        ).groups()
        assert int(tokens.replace(",", "")) == 16 * int(each)
        assert float(cache_gib) == pytest.approx(0, abs=0.1)
        waits = ", others wait in its queue" if 16 * int(each) > 2000 else ""
        assert f"the server has room for 2,000 tokens{waits}." in found
        assert "begins about 2 optimizer steps before it is first trained on, at most 6 (max_staleness)" in found
        assert "begins about 4 optimizer steps" in check(**stream, num_iterations=2)[1]
        # As vLLM without its development mode.
        fake.get = lambda path: answers(path) if path != "/server_info" else ["nothing"]
        assert "the server has room" not in check(**stream)[1]


def http_error(status):
    # The Hub's client has changed its HTTP library, so the response is none of a library's.
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError("Invalid user token.", response=response)


ME = {"name": "me", "orgs": [{"name": "us"}]}


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("us/model", ME, "will be pushed to 'us/model', as me"),
        ("model", ME, "will be pushed to 'me/model', as me"),
        ("them/model", ME, "belongs to 'them', but the token belongs to me, member of us"),
        ("a/b/c", ME, "the Hub refuses 'a/b/c': Repo id must"),
        ("us/model", http_error(401), "the Hub refuses 'us/model': Invalid user token."),
        ("us/model", LocalTokenNotFoundError("none"), "the Hub refuses 'us/model': none"),
        ("us/model", http_error(503), "'us/model' was not checked for a push"),
        ("us/model", ConnectionError("down"), "The Hub cannot be reached"),
    ],
)
def test_the_hub_is_asked(name, answer, message, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.whoami", Mock(side_effect=[answer]))
    warnings = []
    refused = "belongs to 'them'" in message or "refuses" in message
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        said = hub(config(tmp_path, push_to_hub=True, hub_model_id=name), warnings.append)
        assert message in " ".join([said, *warnings])
    assert len(warnings) == ("not checked" in message or "reached" in message)


REFUSED = {
    "rate": {"learning_rate": -1.0},
    "schedule's parameters": {"lr_scheduler_kwargs": {"min_rl": 0.1}, "lr_scheduler_type": "cosine_with_min_lr"},
    "modules": {"use_peft": True, "lora_target_modules": ["nosuch"]},
    "attention": {"attn_implementation": "nosuch"},
    "loss": {"objective": "gspo", "loss_type": "dapo"},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_training_would_refuse_after_the_model_is_loaded_is_refused(case, recipe, capsys, monkeypatch):
    path = recipe(use_cpu=True, bf16=False, **REFUSED[case])
    assert main(["check", path]) == 2
    said = capsys.readouterr().err
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert main(["train", path]) == 2
    assert capsys.readouterr().err == said
    assert said.count("\n") == 1
    assert any(key in said for key in REFUSED[case])


def test_a_template_of_the_recipe_can_be_unset(recipe, capsys):
    assert main(["check", recipe(prompt_template="So: {prompt}"), "--prompt_template", "none"]) == 0
    said = capsys.readouterr().out
    assert "So: State" not in said
    assert "prompt_template: null" in said
