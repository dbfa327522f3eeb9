"""A pip installation is complete: the wheel suffices to write a recipe, check it and train, in an empty folder."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="needs the build backend, which the extra `dev` has")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("basis_rl-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs a command of an environment that has the wheel, and of this environment all but the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    here = sysconfig.get_paths()["purelib"]
    target = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"])
    site = Path(target.decode().strip())
    # Not by a .pth file: what makes the checkout importable there is one, too, and would be read.
    (site / "sitecustomize.py").write_text(f"import sys\nsys.path.append({here!r})\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)

    def run(*words, cwd):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [str(python), *words] if words[0].startswith("-") else [str(folder / "bin" / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    return run


def test_the_wheel_holds_the_package_and_what_is_shipped_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert all(name.startswith(("basis_rl/", "basis_rl-")) for name in names)
    tracked = subprocess.check_output(["git", "ls-files", "basis_rl"], cwd=ROOT, text=True).split()
    assert set(tracked) <= set(names), "every template and list of citations"
    for folder in ("accelerate_configs/*.yaml", "examples/**/*.yaml", "examples/**/*.py"):
        assert {f"basis_rl/{path.relative_to(ROOT)}" for path in ROOT.glob(folder)} <= set(names)


def test_from_an_empty_folder_to_a_trained_model(installed, tiny_path, tmp_path):
    where = installed("-c", "import basis_rl; print(basis_rl.__file__)", cwd=tmp_path)
    assert str(ROOT) not in where, "the checkout is not what is tested"
    rows = [{"prompt": f"What is {i} + {i % 7}?", "solution": str(i + i % 7)} for i in range(300)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = installed(
        *("basis-rl", "init", "recipe.yaml", "--model", str(tiny_path), "--data", "sums.jsonl", "--cpu"), cwd=tmp_path
    )
    assert "basis-rl check recipe.yaml" in written
    said = installed("basis-rl", "check", "recipe.yaml", "--accelerate_config", "zero3_cpu", cwd=tmp_path)
    assert "DeepSpeed ZeRO-3 on 2 process(es)" in said
    assert "The recipe is in order" in said
    short = ["--max_steps", "2", "--gradient_accumulation_steps", "2", "--eval_steps", "2", "--save_steps", "2"]
    installed("basis-rl", "train", "recipe.yaml", *short, "--max_completion_length", "8", cwd=tmp_path)
    run = tmp_path / "runs" / "recipe"
    assert {"model.safetensors", "README.md", "recipe.yaml", "training.png"} <= {path.name for path in run.iterdir()}
    assert any("eval_reward" in json.loads(line) for line in (run / "metrics.jsonl").open())
    installed("basis-rl", "init", "paper.yaml", "--recipe", "papers/basis-qwen3-4b", cwd=tmp_path)
    installed("basis-rl", "compare", "runs/recipe", cwd=tmp_path)
    assert (tmp_path / "report" / "report.html").is_file()


def test_every_shipped_recipe_can_be_run_after_the_quickstart_that_makes_its_model(installed, tmp_path):
    """Beside a folder of one's own that is called examples; other recipes name models of the Hub."""
    (tmp_path / "examples").mkdir()
    few = ["--dataset_kwargs.size", "400", "--per_device_train_batch_size", "16", "--max_steps", "4"]
    said = installed("basis-rl", "quickstart", "--max_warm_start_steps", "3", *few, cwd=tmp_path)
    assert "Accuracy:" in said
    assert "The recipe is in order" in installed("basis-rl", "check", "quickstart/history", cwd=tmp_path)
    (tmp_path / "examples").rmdir()
    # The reward of the third example is a function of its own.
    assert "last_number" in installed("basis-rl", "check", "examples.smollm2.problems:last_number", cwd=tmp_path)
