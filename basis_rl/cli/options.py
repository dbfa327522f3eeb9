"""The options of the commands, their ``--help``, and what is checked about them without importing torch or TRL."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from inspect import getdoc
from pathlib import Path
from urllib.parse import urlsplit

from basis_rl import resources
from basis_rl.names import as_name, file_format
from basis_rl.recipe.sources import Key, known_keys
from basis_rl.recipe.words import check_data, check_flags, check_words, peek, read_words

# Seconds to wait for the Hub's address.
_TIMEOUT = 3.0
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
INIT_MODEL = "Qwen/Qwen3-0.6B"
INIT_DATASET = "openai/gsm8k"
# Options of `train` that are handed to `accelerate launch`; no recipe has keys of these names.
LAUNCHER = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
RECIPE_COMMANDS = ("train", "values", "clusters", "check", "sweep")
# Of TRL's and transformers' keys those that most recipes set.
_OFTEN = (
    "model_name_or_path", "dtype", "use_peft", "lora_r", "output_dir", "learning_rate", "lr_scheduler_type",
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps",
    "steps_per_generation", "num_iterations", "max_completion_length", "temperature", "beta", "epsilon",
    "epsilon_high", "reward_weights", "use_vllm", "vllm_mode", "vllm_server_base_url", "eval_strategy",
    "eval_steps", "num_generations_eval", "logging_steps", "save_strategy", "save_steps", "resume_from_checkpoint",
    "report_to", "push_to_hub", "hub_model_id", "bf16", "use_cpu", "seed",
)  # fmt: skip
_TITLES = {
    "values": "Keys of `basis-rl values`, in a recipe in its section `values`",
    "clusters": "Keys of `basis-rl clusters`, in a recipe in its section `clusters`",
    "run": "Baseline, objective, prompts, rewards, tools",
    "data": "Problems",
    "trainer": "Trainer",
    "often": "Of TRL's and transformers' keys those that most recipes set",
    "trl": "TRL's keys",
    "transformers": "transformers' keys",
    "eval": "Options",
}
_SECTIONS = {
    "train": ("run", "data", "trainer", "often"),
    "values": ("values", "run", "data", "often"),
    "clusters": ("clusters", "data", "often"),
    "eval": ("eval", "data"),
}


# The `add_argument` of a parser.
Add = Callable[..., argparse.Action]
# Each command's parser by its name; only that of `eval` has its options elsewhere (`EvalArguments`).
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {}
_USAGE = {
    "check": "basis-rl check RECIPE.yaml [options] [--key value ...]\n       basis-rl check module:name",
    "eval": "basis-rl eval MODEL [--option value ...]",
    **{name: f"basis-rl {name} RECIPE.yaml [--key value ...]" for name in ("train", "values", "clusters")},
}


def _command(add_options: Callable[[Add], None]) -> Callable[[], argparse.ArgumentParser]:
    """What makes a command's parser, from ``NAME_parser``, which adds its options and whose docstring is its help.

    The text is wrapped to the terminal, by paragraphs.
    """
    command = add_options.__name__.removesuffix("_parser")
    paragraphs = (getdoc(add_options) or "").split("\n\n")

    def make() -> argparse.ArgumentParser:
        result = argparse.ArgumentParser(
            prog=f"basis-rl {command}",
            usage=_USAGE.get(command),
            description="\n\n".join(textwrap.fill(text, _width()) for text in paragraphs),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_options(result.add_argument)
        if command == "init":
            recipes = ["Shipped recipes, which can be trained by name as well:", *resources.recipes()]
            configs = [
                "Shipped configurations of accelerate, for --accelerate_config:",
                *resources.accelerate_configs(),
            ]
            result.epilog = "\n  ".join(recipes) + "\n" + "\n  ".join(configs)
        return result

    PARSERS[command] = make
    return make


@_command
def train_parser(add: Add) -> None:
    """Trains a model from a recipe, and writes model, tokenizer, log, recipe, plot and card into output_dir. Every key
    of a recipe is an option too, and overrides the recipe: --learning_rate 1e-6, --baseline_kwargs.weighting vop.

    The terminal shows one line per log: the step; reward, the mean reward of the sampled rollouts; len, their mean
    number of tokens; cut, the share that was cut off; s/step, seconds per step; tok/s, tokens per second; lr, the
    learning rate; err, the mean squared error of the baseline; zero, the share of the rollouts that teach nothing
    (every advantage is 0); and the time left. Columns that do not fit into 80 characters are left out. Lines with eval
    show what eval_strategy measures, avg@k and pass@k, and whether its rollouts were greedy or sampled. metrics.jsonl
    in output_dir holds every metric.

    --accelerate_config ddp (fsdp2, zero2, zero3, or a file) starts the command with `accelerate launch`, and takes
    its --num_processes, --num_machines, --machine_rank, --main_process_ip and --main_process_port.

    SIGTERM, SIGUSR1, SIGHUP (the terminal was closed, unless `nohup` started it) or a file STOP in output_dir end the
    training after the current step with a checkpoint (exit code 75). --resume_from_checkpoint auto resumes from it.
    Exit code 68: a rank was lost. Exit code 69: the vLLM server was lost. Exit code 70: max_nonfinite_steps steps in a
    row had no finite gradient, a reward function failed, or the disk is full.
    """


@_command
def values_parser(add: Add) -> None:
    """Builds the value table that BASIS needs: samples the model of a recipe on its prompts, scores the rollouts, and
    writes their rewards to values_output_dir, by default the folder that `values` in baseline_kwargs names. After an
    interruption the same command resumes; finished prompts are kept.
    """


@_command
def clusters_parser(add: Add) -> None:
    """Builds the prompt codebook that BV-Blend needs: embeds the prompts of a recipe with a sentence encoder, clusters
    them with K-means, and writes the codebook to clusters_output_dir, by default the folder that `clusters` in
    baseline_kwargs names.
    """


@_command
def eval_parser(add: Add) -> None:
    """Samples a model on benchmarks, grades with Math-Verify, keeps every rollout, and reports avg@k, pass@k and maj@k
    with bootstrap intervals over problems. The same command resumes where it ended.

    In place of benchmarks your own data is named as in a recipe, --dataset_name x.jsonl: the problems that training
    holds out (test_fraction, dataset_test_split), or without these keys all of them. --compare has before and after in
    one table.

    Benchmarks: aime24, aime25, amc23, hmmt25, math500, minerva, olympiadbench, gsm8k; the path of a file (.json,
    .jsonl, .parquet, .csv); or NAME=SOURCE, such as math500=data/math500.jsonl, where SOURCE may also be a Hub id or
    reasoning_gym:NAME.
    """


@_command
def check_parser(add: Add) -> None:
    """Checks everything that training checks before its first step, without loading the model's weights, and prints
    what the run would need. With module:name it checks a baseline, prompt sampler, objective or reward function of your
    own. It takes the options of `train` for several processes.
    """
    add("--accelerate_config", help="A configuration of accelerate: a file, or the name of a shipped one (zero3).")
    add(
        "--num_processes",
        "--world_size",
        dest="world_size",
        type=int,
        help="The number of processes. By default that of the configuration or environment.",
    )
    for name in LAUNCHER[1:]:
        # Where processes run changes nothing that is checked.
        add(f"--{name}", help=argparse.SUPPRESS)
    add("--gpu_memory", type=float, help="The memory of a GPU in GiB. The default is that of this machine's first.")
    add("--strict", action="store_true", help="Warnings also give exit code 2.")
    add(
        "--draw",
        type=int,
        default=0,
        metavar="N",
        help="Loads the model, samples N rollouts, grades and shows them. From 64 on, there are four per prompt, and "
        "the share of groups without variance is estimated for each prompt sampler.",
    )


@_command
def quickstart_parser(add: Add) -> None:
    """Trains a small model on this CPU: makes it, trains it, and shows what has become better. Nothing is downloaded.

    Other examples make the models of the recipes of their names: tools, in which a model learns to call a calculator,
    and smollm2, a real language model, which is downloaded.
    """
    add("example", nargs="?", default="quickstart", help=", ".join(resources.EXAMPLES))
    add("--output_dir", metavar="FOLDER", help="The folder of what is made; default: runs/ and the example's name.")
    add("--KEY", metavar="VALUE", help="Any key of the example's recipe.")


@_command
def init_parser(add: Add) -> None:
    """Writes a commented recipe to start from, with your own model and data if you name them."""
    add("file", nargs="?", default="recipe.yaml", type=Path, help="file to write; default: recipe.yaml")
    add("--model_name_or_path", "--model", metavar="MODEL", help=f"Hub id or folder; default: {INIT_MODEL}")
    add("--dataset_name", "--data", metavar="DATA", help=f"Hub id or file with the problems; default: {INIT_DATASET}")
    add("--output_dir", metavar="FOLDER", help="folder of the run; default: runs/ and the name of the file")
    add("--prompt_column", metavar="NAME", help="column of the problem; default: found by its name")
    add("--solution_column", metavar="NAME", help="column of the gold; default: found by its name")
    add("--reward_funcs", metavar="NAME", help="reward function; default: by what the golds are")
    add("--cpu", action="store_true", help="settings for a machine without a GPU")
    add("--recipe", metavar="NAME", help="copy this shipped recipe as it is, instead")
    add("--force", action="store_true", help="replace a file that is there")


@_command
def sweep_parser(add: Add) -> None:
    """Trains a recipe with several baselines and seeds, one run after the other, each in its own process and all with
    the same number of rollouts, and then compares them. Called again, it skips finished runs and resumes the others
    (from their last checkpoint, if the recipe saves any).

    A baseline may have its own settings: --baselines
    basis,rloo:num_generations=4,basis:baseline_kwargs.weighting=vop. Every key of a recipe can be overridden, and
    several values make several runs: --learning_rate 1e-4,3e-4.
    """
    add("recipe", metavar="RECIPE", help="The recipe that all runs share.")
    add("--baselines", nargs="+", required=True, help="The baselines, as NAME[:KEY=VALUE]..., with commas or blanks.")
    add("--seeds", nargs="+", default=["0"], help="The seeds: 0,1,2. The default is 0.")
    add("--budget", type=float, help="Rollouts per run. The default is that of the recipe.")
    add("--output_dir", type=Path, help="The folder of the runs. By default the recipe's output_dir with -sweep added.")
    add("--accelerate_config", help="Starts each run with `accelerate launch`, as for `train`.")
    add("--num_processes", type=int, help="Of each run. By default those of the configuration.")


@_command
def compare_parser(add: Add) -> None:
    """Compares runs at the same number of rollouts: learning curves, final table, differences. Runs that differ only in
    their seed become one line with its spread.
    """
    add("runs", nargs="+", metavar="RUN", help="The output_dir of a run, or a folder that holds runs.")
    add("--reference", metavar="NAME", help="The setting to compare with. The default is the first.")
    add("--output_dir", type=Path, default=Path("report"), help="The folder of the report.")


@_command
def rollouts_parser(add: Add) -> None:
    """Shows rollouts that a run has kept (keep_rollouts_mb): the prompt, the answer, the reward of each function and
    what the functions say of it (log_extra), the value of the baseline, the advantage, and the chance with which a
    prompt sampler drew the prompt.
    """
    add("output_dir", metavar="RUN", type=Path, help="The output_dir of a run.")
    add("--step", help="last, all, N or N-M. The default is last, and all with --page.")
    add("--reward_below", type=float, metavar="X", help="Rewards of at most X.")
    add("--reward_above", type=float, metavar="X", help="Rewards of at least X.")
    add("--prompt", default="", metavar="TEXT", help="Part of the prompt, or its prompt_id.")
    add("--verdict", default="", metavar="TEXT", help="Part of the verdict of the reward function, such as unsound.")
    orders = ("step", "reward", "advantage", "length")
    add("--sort", default="step", choices=orders, help="The largest first, advantages by their size. Default: step.")
    add("--limit", type=int, help="Shows at most this many. The default is 20, and 500 with --page.")
    add("--ask_math_verify", action="store_true", help="Says which of the rejected answers it alone finds equal.")
    add("--page", type=Path, metavar="FILE.html", help="Writes a page for a browser instead.")


@_command
def push_parser(add: Add) -> None:
    """Writes the model card again, with the results of all evaluations since, and pushes the folder to the Hub as one
    commit.
    """
    add("output_dir", type=Path, help="The output_dir of a run.")
    add("repo_id", nargs="?", help="OWNER/NAME. The default is the run's own, or the folder's name.")
    add("--private", action="store_true", help="Creates the repository as a private one.")
    add("--revision", help="The branch, which is created if needed. The default is main.")
    add("--push_rollouts", action="store_true", help="Pushes the rollouts that were kept as well.")
    add("--results", type=Path, help="results.json of its evaluation. The default is in OUTPUT_DIR.")
    add("--base_results", type=Path, help="results.json of the base model, for comparison.")


@_command
def serve_parser(add: Add) -> None:
    """Starts a vLLM server that training can generate with, waits until it is healthy, and stops it on Ctrl-C or
    SIGTERM. Unknown options are passed to vLLM: --tensor-parallel-size 4, --gpu-memory-utilization 0.9.
    """
    add("model", help="A Hub id or a folder.")
    add("--host", default="127.0.0.1", help="The address. Keep it private: who reaches it can change the weights.")
    add("--port", type=int, default=8000, help="The port. The default is 8000.")
    add("--dtype", default="auto", help="The precision of the weights, which is that of the training.")
    add("--max-model-len", type=int, default=None, help="Length of prompt and rollout together, in tokens.")
    add("--max-lora-rank", type=int, default=None, help="Rank of the adapters that vllm_lora_sync: adapter sends.")


def check_names(command: str, argv: Sequence[str]) -> None:
    """Refuse misspelt keys and options, and look whether the Hub is there, before anything heavy is imported.

    Raises:
        ValueError: a key or an option that the command does not know, a recipe that cannot be read.
    """
    words = list(argv)
    if command == "eval":
        check_flags(words, {flag for key in known_keys("eval") for flag in key.flags})
        check_data({}, words)
        go_offline_if_unreachable(command, words)
    if command not in RECIPE_COMMANDS:
        return
    if command == "check":
        words = check_parser().parse_known_args(words)[1]
        if words and ":" in words[0] and not Path(words[0]).exists():
            return
    if command == "sweep":
        options, words = sweep_parser().parse_known_args(words)
        words = [options.recipe, *words]
    check_words(words)
    go_offline_if_unreachable(command, words)


def help_of(command: str, *, everything: bool = False) -> str:
    """What ``--help`` prints, or with `everything` ``--help-all``: also the keys of TRL and transformers."""
    shown = _SECTIONS.get(command, ())
    if everything and command != "eval":
        shown = tuple(dict.fromkeys([*shown[:-1], "run", "data", "trainer", "trl", "transformers"]))
    parts = [PARSERS[command]().format_help()]
    if command in ("check", "sweep"):
        parts.append("The keys of a recipe are also options; `basis-rl train --help` lists them.\n")
    parts += _sections(shown)
    if command in RECIPE_COMMANDS and not everything:
        parts.append(f"`basis-rl {command} --help-all` also lists all keys of TRL and transformers.")
    return "\n".join(parts).rstrip() + "\n"


def _sections(names: Sequence[str]) -> list[str]:
    keys = {(key.name, key.source): key for key in (*known_keys(), *known_keys("eval"))}.values()
    often = {key.name: key for key in known_keys() if key.name in _OFTEN}
    found = []
    for name in names:
        chosen = [often[each] for each in _OFTEN] if name == "often" else [key for key in keys if key.source == name]
        lines = [_described(key, brief=name == "often") for key in chosen]
        found.append("\n".join([f"{_TITLES[name]}:", *lines, ""]))
    return found


def _described(key: Key, *, brief: bool) -> str:
    """A key, its type and default, and below them its meaning; if `brief` the first sentence of it."""
    text = key.help.split(". ")[0].rstrip(".") + "." if brief else key.help
    shown = repr(key.default) if "\n" in key.default else key.default
    default = "" if key.default in ("null", "") else f", default {shown}"
    fill = partial(textwrap.fill, width=_width(), subsequent_indent=" " * 6)
    head = fill(f"--{key.name} ({key.type.removesuffix(' | None')}{default})", initial_indent="  ")
    return f"{head}\n{fill(text, initial_indent=' ' * 6)}"


def _width() -> int:
    return min(max(shutil.get_terminal_size((80, 24)).columns, 60), 100)


def go_offline_if_unreachable(command: str, argv: Sequence[str]) -> None:
    """Set ``HF_HUB_OFFLINE`` where a command names something of the Hub, and the Hub cannot be reached.

    Without it the Hub's client retries for half a minute per file. With it what is in the cache is used at once, and
    what is not is an error at once. Must be called before the Hub's client is imported. A run that pushes stays online:
    the Hub may be back at its end.
    """
    if "HF_HUB_OFFLINE" in os.environ or not asks_the_hub(command, argv) or can_be_reached():
        return
    # The client reads this variable once, when it is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        text = "The Hub cannot be reached, so only what is in its cache is used (HF_HUB_OFFLINE=1)."
        print(f"basis-rl: note: {text}", file=sys.stderr)


def asks_the_hub(command: str, argv: Sequence[str]) -> bool:
    """Whether the model or the dataset of a command is on the Hub, and nothing is pushed there.

    Raises:
        ValueError: a recipe that cannot be read.
    """
    if command in ("init", "eval"):
        # Their default data is on the Hub.
        return True
    words = read_words(argv)
    keys = ("model_name_or_path", "dataset_name", "push_to_hub")
    given = {key: words.config.get(key) for key in keys} | peek(words.arguments, keys)[0]
    pushes = str(given.pop("push_to_hub") or False).lower() not in ("false", "no", "0")
    names = [as_name(name) for name in given.values() if name]
    local = [bool(Path(name).exists() or ":" in name or file_format(name)) for name in names]
    return not pushes and not all(local)


def can_be_reached() -> bool:
    """Whether the Hub's address answers within three seconds. With a proxy this is not known, and assumed."""
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        with socket.create_connection((url.hostname or "", port), _TIMEOUT):
            return True
    except (OSError, ValueError):
        return False
