"""What comes with the package is found by name, in a checkout as in a wheel, and a missing extra is named."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from basis_rl import names, resources
from basis_rl.cli.main import main
from basis_rl.names import EXTRAS, missing_extra, require_extra
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.words import read_recipe

ROOT = Path(__file__).resolve().parents[1]


def test_configurations_and_recipes_have_names():
    assert {"cpu", "ddp", "fsdp2", "zero2", "zero3", "zero3_cpu", "zero3_nodes"} == set(resources.accelerate_configs())
    assert {"papers/basis-qwen3-4b", "quickstart/basis"} <= set(resources.recipes())
    for name in ("zero3", "zero3.yaml", "accelerate_configs/zero3.yaml"):
        assert yaml.safe_load(resources.accelerate_config(name).read_text())["distributed_type"] == "DEEPSPEED"
    for name in ("papers/basis-qwen3-4b", "examples/papers/basis-qwen3-4b.yaml"):
        assert read_recipe(name)["baseline"] == "basis"


def test_a_file_of_ones_own_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("zero3").write_text("distributed_type: NO\n")
    assert resources.accelerate_config("zero3") == Path("zero3")


def test_the_nearest_name_is_told():
    with pytest.raises(ValueError, match=r"There is no configuration of accelerate 'zreo3'.*Did you mean 'zero3'\?"):
        resources.accelerate_config("zreo3")
    with pytest.raises(ValueError, match=r"There is no recipe 'mine.yaml': .*quickstart/basis"):
        resources.recipe("mine.yaml")


def test_examples_of_the_package_run_by_name(monkeypatch, capsys):
    """The first one by default; what follows the name is the example's own."""
    given = []
    for name in resources.EXAMPLES:
        module = importlib.import_module(f"examples.{name}.run")
        monkeypatch.setattr(module, "main", lambda argv, name=name: given.append((name, argv)))
    for words in ([], ["--seed", "1"], ["tools", "--seed", "1"], ["smollm2"]):
        assert main(["quickstart", *words]) == 0
    own = ["--seed", "1"]
    assert given == [("quickstart", []), ("quickstart", own), ("tools", own), ("smollm2", [])]
    assert main(["quickstart", "tool"]) == 2
    assert "Did you mean 'tools'?" in capsys.readouterr().err


def test_a_missing_extra_is_named_by_our_name(monkeypatch, tmp_path):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(declared)
    for module, extra in EXTRAS.items():  # what the extra installs is what is looked for
        assert any(re.match(rf"{module.replace('_', '[-_]')}\b", wanted) for wanted in declared[extra]), module
    assert missing_extra("peft", "use_peft") is None
    monkeypatch.setattr(names.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"use_peft needs peft, .*`pip install 'basis-rl\[peft\]'`\.$"):
        require_extra("peft", "use_peft")
    given = ["--model_name_or_path", "m", "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    for option, extra in (("--use_peft true", "peft"), ("--deepspeed ds.json", "deepspeed")):
        with pytest.raises(ValueError, match=rf"'basis-rl\[{extra}\]'"):
            parse_recipe([*given, *option.split()])
