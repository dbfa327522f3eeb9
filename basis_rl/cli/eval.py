"""``basis-rl eval MODEL --benchmarks NAME,NAME``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from basis_rl.cli.main import LOST, STOPPED, fail
from basis_rl.engine import ServersLost
from basis_rl.engine.server import ServerError
from basis_rl.evaluation.arguments import EvalArguments
from basis_rl.evaluation.plan import EvalPlan
from basis_rl.recipe.build import load_by_name
from basis_rl.recipe.file import Parser
from basis_rl.recipe.words import check_flags
from basis_rl.rewards import MathVerifyReward


def parser() -> Parser:
    """The options, `EvalArguments`; dashes and underscores are the same."""
    return Parser(EvalArguments, prog="basis-rl eval MODEL", allow_abbrev=False)


def main(argv: Sequence[str]) -> int:
    """Evaluate; returns the exit code."""
    words = list(argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--model")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "basis-rl eval runs in one process: start it without accelerate launch, and for several GPUs with "
            "--backend vllm --vllm_args='--data-parallel-size N'."
        )
    keys = parser()
    check_flags(words, keys.flags())
    (options,) = keys.parse_args_into_dataclasses(words, look_for_args_file=False)
    config, tokenizer = load_by_name(options.model, options.revision, options.trust_remote_code)
    kept = f"The rollouts so far are in {options.folder}; the same command resumes."
    reward = MathVerifyReward(num_workers=options.num_workers, answer_in=options.answer_in)
    try:
        plan = EvalPlan(options, config, tokenizer, reward)
        print(f"\n{plan.run()}\n\nRollouts and results are in {options.folder}.", flush=True)
        return 0
    except (ServerError, ServersLost) as error:
        return fail(f"{error} {kept}", LOST)
    except KeyboardInterrupt:
        return fail(f"Interrupted. {kept}", STOPPED)
    finally:
        reward.close()
