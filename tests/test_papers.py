"""Every line of `examples/papers/README.md` passes `basis-rl check`, with the real models' shapes and no network.

So do the recipes of `examples/gsm8k`, by the commands that they name.
"""

import contextlib
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from transformers import Qwen2Config, Qwen3Config
from trl.chat_template_utils import qwen2_5_chat_template

from basis_rl.cli.main import main
from basis_rl.estimate.footprint import Launch, planned
from basis_rl.recipe.file import parse_recipe
from examples.papers.orz_dapo import merge
from tests.support.fake_vllm import FakeServer
from tests.support.tiny import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ROOT / "examples" / "papers"
GSM8K = sorted((ROOT / "examples" / "gsm8k").glob("*.yaml"))
ROWS = [
    (setting.strip(), shlex.split(command))
    for setting, command in re.findall(r"^\|([^|]+)\| `(\S+\.yaml[^`]*)` \|", (PAPERS / "README.md").read_text(), re.M)
]

# The published config.json of each model, as far as it determines shape and context; billions of parameters.
QWEN = {"vocab_size": 151936, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "max_position_embeddings": 40960}
SMALL = {"hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128, "max_position_embeddings": 40960}
LARGE = {"hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128, "max_position_embeddings": 32768}
OLDER = {"vocab_size": 152064, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
OLDER |= {"hidden_size": 3584, "intermediate_size": 18944, "tie_word_embeddings": False}
MODELS = {
    "Qwen/Qwen3-0.6B": (
        Qwen3Config(**QWEN | TINY | {"num_hidden_layers": 28, "num_attention_heads": 16}, tie_word_embeddings=True),
        0.596,
    ),
    "Qwen/Qwen3-4B": (Qwen3Config(**QWEN, **SMALL, tie_word_embeddings=True), 4.02),
    "Qwen/Qwen3-8B-Base": (Qwen3Config(**QWEN, **LARGE, tie_word_embeddings=False), 8.19),
    "Qwen/Qwen2.5-Math-7B": (Qwen2Config(**OLDER, max_position_embeddings=4096), 7.62),
    "Qwen/Qwen2.5-7B": (Qwen2Config(**OLDER, max_position_embeddings=131072), 7.62),
}
# (id, configuration) of a data set -> problem i, its gold, and the columns that could be taken for one of them.
DATA = {
    ("open-r1/DAPO-Math-17k-Processed", "all"): lambda i: {
        "prompt": f"What is {i} + 1?",
        "solution": str(i + 1),
        "data_source": "math_dapo",
        "source_prompt": [{"role": "user", "content": f"Solve. {i} + 1 Answer:"}],
        "reward_model": {"ground_truth": str(i + 1), "style": "rule-lighteval/MATH_v2"},
    },
    ("open-r1/OpenR1-Math-220k", "default"): lambda i: {
        "problem": f"What is {i} + 1?",
        "solution": f"It is \\boxed{{{i + 1}}}.",
        "answer": str(i + 1),
        "source": "olympiads",
    },
    ("zwhe99/MATH", None): lambda i: {
        "problem": f"What is {i} + 1?",
        "level": "Level 1",
        "solution": f"It is $\\boxed{{{i + 1}}}$.",
        "expected_answer": str(i + 1),
    },
    ("openai/gsm8k", "main"): lambda i: {
        "question": f"Ann has {i} pens and buys one more. How many has she?",
        "answer": f"She has {i} + 1 = <<{i}+1={i + 1}>>{i + 1} pens.\n#### {i + 1}",
    },
    ("Chenmien/OpenReasonerZero", None): lambda i: {
        "messages": [{"role": "user", "content": f"What is {i} + 3?"}],
        "answer": str(i + 3),
    },
}
ROWS_OF = {"zwhe99/MATH": 1030, "openai/gsm8k": 1030}
GPUS = {"basis": 4, "otb": 8, "bv-blend": 8, "reinforce-pp": 8, "sao": 4}


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    """In place of the Hub: the models' configurations, a small tokenizer, some rows of each data set."""

    def load_dataset(name, config=None, split=None, data_files=None):
        assert split == "train" or name == "openai/gsm8k"
        if data_files is not None:
            return Dataset.from_list([json.loads(line) for line in Path(data_files).read_text().splitlines()])
        return Dataset.from_list([DATA[name, config](i) for i in range(ROWS_OF.get(name, 520))])

    tokenizers = {name: tiny_tokenizer() for name in MODELS}
    for name in ("Qwen/Qwen2.5-7B", "Qwen/Qwen3-4B"):  # they call tools
        template = qwen2_5_chat_template.replace("You are Qwen, created by Alibaba Cloud. ", "")
        tokenizers[name].chat_template = template
    tokenizers["Qwen/Qwen2.5-7B"].eos_token = "<|endoftext|>"  # as that of the base model
    monkeypatch.setattr("basis_rl.data.prompts.load_dataset", load_dataset)
    monkeypatch.setattr("basis_rl.recipe.build.AutoConfig.from_pretrained", lambda name, **_: MODELS[name][0])
    monkeypatch.setattr("basis_rl.recipe.build.AutoTokenizer.from_pretrained", lambda name, **_: tokenizers[name])


def launch_of(name):
    gpus = next(count for prefix, count in GPUS.items() if name.startswith(prefix))
    engine = "fsdp2" if name.startswith("bv-blend") else "zero3"
    memory = 79 if name.startswith(("otb", "reinforce", "sao")) else 95
    return engine, gpus, memory


def name_of(row):
    return row[1][0]


FIRST = {name_of(row): row for row in reversed(ROWS)}  # of each recipe; the other lines change a few keys of it


@pytest.fixture
def checked(reward, capsys, monkeypatch, tmp_path):
    """What `basis-rl check` says with these words in an empty folder (no table, no codebook), and what it warns of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("basis_rl.recipe.build.build_rewards", lambda run: [reward])
    monkeypatch.setattr("basis_rl.estimate.report.free_bytes", lambda folder: 1 << 50)
    # The fast tests also run where vLLM is not installed.
    monkeypatch.setattr("basis_rl.cli.check_sections.missing_extra", lambda module, what: None)

    def check(words, recipe):
        code = main(["check", *words])
        said = capsys.readouterr()
        assert code == 0, said.err
        counted = int(re.search(r"([\d,]+) parameters", said.out).group(1).replace(",", ""))
        assert counted == pytest.approx(MODELS[recipe["model_name_or_path"]][1] * 1e9, rel=0.01)
        return said.out, re.findall(r"^\d+\. (.*)", said.out, re.M)

    return check


@pytest.mark.parametrize(
    "row",
    [row if FIRST[name_of(row)] is row else pytest.param(row, marks=pytest.mark.long) for row in ROWS],
    ids=lambda row: f"{row[1][0].removesuffix('.yaml')}: {row[0]}",
)
def test_check(row, checked, tmp_path):
    if name_of(row).startswith("reinforce-pp-tir"):
        assert merge(tmp_path / "runs" / "papers" / "orz_dapo.jsonl") == 1040
    _, (name, *overrides) = row
    engine, gpus, memory = launch_of(name)
    launch = ["--accelerate_config", str(ROOT / f"accelerate_configs/{engine}.yaml"), "--world_size", str(gpus)]
    recipe = yaml.safe_load((PAPERS / name).read_text())
    with contextlib.ExitStack() as servers:
        if recipe["vllm_mode"] == "server":
            served = FakeServer(max_model_len=recipe["vllm_max_model_length"], root=recipe["model_name_or_path"])
            overrides += ["--vllm_server_base_url", servers.enter_context(served).url]
        words = [str(PAPERS / name), *overrides, *launch, "--gpu_memory", str(memory)]
        said, warnings = checked(words, recipe)
    # A table that is not built yet is all there is to warn of: the run fits GPUs and context, epsilon its ratio.
    needs = re.search(r"(values|clusters): ", said.split("== Batch")[0]) is not None
    assert len(warnings) == needs, warnings
    assert all(re.search(r"There is no (value table|prompt codebook) at .* yet. Build it", w) for w in warnings)


@pytest.mark.parametrize("path", GSM8K, ids=lambda path: path.stem)
def test_gsm8k_checks_by_its_own_command(path, checked):
    (command,) = re.findall(r"^# +basis-rl check (.*)", path.read_text(), re.M)
    said, warnings = checked(shlex.split(command), yaml.safe_load(path.read_text()))
    assert not warnings, said
    assert "within \\boxed{}" in said


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[1][0].removesuffix('.yaml')}: {row[0]}")
def test_batches_are_the_papers(row):
    _, (name, *overrides) = row
    _, gpus, _ = launch_of(name)
    with planned(Launch(gpus)):
        recipe = parse_recipe([str(PAPERS / name), *overrides])
    args = recipe.args
    each = gpus * args.per_device_train_batch_size * args.gradient_accumulation_steps
    prompts = args.generation_batch_size // args.num_generations
    if name.startswith("basis"):  # 512 responses a step, two updates; 150 steps for BASIS, 300 for the others
        assert (args.generation_batch_size, each) == (512, 256)
        assert args.max_steps / 2 == (150 if recipe.run.baseline == "basis" else 300)
        assert prompts == (64 if args.num_generations == 8 else 512)
        small = args.epsilon < 1e-3 and args.epsilon_high < 1e-3
        assert small == (recipe.run.objective == "gspo")
    elif name.startswith("otb"):  # on-policy, 128 prompts
        assert (prompts, each) == (128, args.generation_batch_size)
    elif name.startswith("sao"):  # 128 trajectories a step, each of its own prompt
        assert (prompts, args.num_generations, each) == (128, 1, 128)
    elif name.startswith("bv-blend"):  # 16 x 8, minibatches of 64, 500 iterations
        assert (prompts, args.num_generations, each, args.max_steps) == (16, 8, 64, 1000)
    else:
        assert (args.generation_batch_size, each) == (1024, 512)
