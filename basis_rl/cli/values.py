"""``basis-rl values RECIPE``."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from huggingface_hub import get_token
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from basis_rl.cli.main import LOST, STOPPED, fail
from basis_rl.engine import ServersLost
from basis_rl.engine.client import check_served
from basis_rl.engine.local import ends_of, load_model
from basis_rl.engine.server import ServerError, addresses
from basis_rl.recipe import build
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.keys import Recipe
from basis_rl.run.artefacts import METADATA
from basis_rl.run.terminal import handling_stop_signals
from basis_rl.trainer.generation_check import check_generation
from basis_rl.trainer.plan import Plan, check_temperature, check_with_model, sampling_of, with_data
from basis_rl.values import ValueTable
from basis_rl.values.build import TablePlan, build_table, merge_shards, use_first_day
from basis_rl.values.shards import Shards, begun
from basis_rl.values.sources import ModelSource, ServerSource, Source
from basis_rl.values.table import KIND


def main(argv: Sequence[str]) -> int:
    """Sample the recipe's model on its prompts, score, and write the table where the baseline will look for it.

    What is finished is kept in ``OUTPUT.partial``, and the same command resumes from there. SIGTERM, SIGUSR1 and
    SIGHUP end it with exit code 75; servers that are lost with 69.
    """
    job = Job(parse_recipe(argv))
    kept = f"What is finished is kept in {job.shards.folder}; the same command resumes from there."
    try:
        with handling_stop_signals(_interrupt):
            table = job.finished() or job.build()
    except KeyboardInterrupt:
        print(f"Stopped. {kept}")
        return STOPPED
    except (ServersLost, ServerError) as error:
        return fail(f"{error} {kept}", LOST)
    if table is None:
        print(f"Part {job.shard[0]} of {job.shard[1]} is done. The last part, or the next call, makes the table.")
        return 0
    print(f"Value table: {job.output}\n{table.describe()}")
    return job.push(table)


class Job:
    """A recipe's value table: all that can be checked is checked before anything is spent.

    Raises:
        ValueError: what is asked for cannot be done.
    """

    def __init__(self, recipe: Recipe) -> None:
        run = recipe.run
        args = recipe.args
        if run.tools or run.environment:
            raise ValueError(
                "basis-rl values draws single turns, and a table of those is not of a policy that calls tools. With "
                "tools or an environment take a baseline without a table: rloo, otb, grpo, basis_history."
            )
        named = run.values_output_dir or (run.baseline_kwargs or {}).get("values")
        output = Path(named or f"{args.output_dir}-values")
        KIND.check_destination(output)
        if run.values_serve and run.values_servers:
            raise ValueError("--values_serve starts a server, --values_servers names running ones: set one of the two.")
        self.recipe = recipe
        self.output = output
        self.shard = _shard(run.values_shard)
        _check_hub(run.values_push_to_hub, args.hub_token)
        run_plan = Plan(args, reward_funcs=build.build_rewards(recipe))
        check_temperature(run_plan)
        check_generation(args)
        self.config, self.tokenizer = build.load_config_and_tokenizer(recipe.model, args, run.chat_template)
        partial = output.with_name(f"{output.name}.partial")
        use_first_day(begun(partial) or _provenance(output))
        loaded = build.load_training_data(recipe, self.tokenizer, run_plan)
        run_plan = with_data(run_plan, loaded, processing_class=self.tokenizer)
        check_with_model(run_plan, self.config)
        self.plan = TablePlan(
            dataset=run_plan.train_dataset,
            reward_funcs=run_plan.reward_funcs,
            sampling=sampling_of(args),
            num_rollouts=run.values_num_rollouts,
            early_exit=run.values_early_exit,
            seed=args.seed,
            reward_weights=args.reward_weights,
            chat_template_kwargs=args.chat_template_kwargs,
        )
        served = run.values_serve or run.values_servers
        sampler = ServerSource.name if served else ModelSource.name_for(run.values_batch_size)
        self.shards = Shards(partial, self.plan.identity(self.config, self.tokenizer, sampler))

    def finished(self) -> ValueTable | None:
        """The table, if an earlier call or another process has made it with the same settings."""
        try:
            table = ValueTable.load(self.output) if self.output.is_dir() else None
        except ValueError:
            return None
        asked = self.shards.identity
        if table is None or any(table.provenance.get(k) != v for k, v in asked.items()):
            return None
        self.shards.remove()
        print("This table already exists. To sample it again, delete it or set another seed.")
        return table

    def build(self) -> ValueTable | None:
        """Draw what is missing, and save the table when all parts are there."""
        table = merge_shards(self.plan, self.shards, self.plan.fingerprints(self.tokenizer))
        if table is None:
            with self._source() as source:
                table = build_table(source, self.plan, self.shards.folder, self.shard)
        with self.shards.merging() as ours:
            if table is not None and ours:
                table.save(self.output)
                self.shards.remove()
        return table if ours else self.finished()

    def push(self, table: ValueTable) -> int:
        """Push it if the recipe says so; the table is saved, whatever comes of this."""
        repo_id = self.recipe.run.values_push_to_hub
        args = self.recipe.args
        if not repo_id:
            return 0
        try:
            url = table.push_to_hub(repo_id, private=args.hub_private_repo, token=args.hub_token)
        except Exception as error:
            return fail(
                f"The table could not be pushed to '{repo_id}' ({type(error).__name__}: {error}). It is saved in "
                f"{self.output}; the same command only repeats the push.",
                LOST,
            )
        print(f"Pushed to {url}")
        return 0

    @contextmanager
    def _source(self) -> Iterator[Source]:
        run = self.recipe.run
        args = self.recipe.args
        name = str(self.recipe.model.model_name_or_path)
        log = self.shards.folder / f"vllm-{self.shard[0]:05d}.log"
        options = build.server_options(self.recipe, 0, log) if run.values_serve else None
        with addresses(run.values_servers or [], options) as urls:
            if not urls:
                settings = {"trust_remote_code": args.trust_remote_code, **build.model_init_kwargs(self.recipe)}
                model = load_model(name, use_cpu=args.use_cpu, **settings)
                yield ModelSource(model, self.tokenizer, run.values_batch_size)
                return
            for url in urls:
                check_served(url, name)
            ends = ends_of(name, self.config, self.tokenizer, self.recipe.model.model_revision)
            waits = {"timeout": args.vllm_request_timeout, "patience": args.vllm_recovery_timeout}
            yield ServerSource(urls, self.config, self.tokenizer, ends, **waits)


def _provenance(folder: Path) -> dict[str, Any]:
    """The provenance of the table in `folder`; empty if there is none, or a damaged one."""
    with suppress(ValueError, KeyError, OSError):
        return dict(json.loads((folder / METADATA).read_text())["provenance"])
    return {}


def _check_hub(repo_id: str | None, token: str | None) -> None:
    if repo_id is None:
        return
    validate_repo_id(repo_id)
    if not (token or get_token()):
        raise ValueError("--values_push_to_hub needs a token of the Hub: `hf auth login`, or HF_TOKEN.")


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 1
    match = re.fullmatch(r"(\d+)/(\d+)", str(text).strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"--values_shard must be `i/n` with i from 0 to n - 1, such as 0/4, got '{text}'.")
    return int(match[1]), int(match[2])


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Every signal acts like Ctrl-C, once: launchers often send them twice."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
