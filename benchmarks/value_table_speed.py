"""How fast is a value table built, compared with vLLM generating the same tokens?

    python -m benchmarks.value_table_speed [--quick]

On one server, two things take turns: the bare requests, whose rollouts are discarded, and `build_table` with the same
requests, which decodes, grades every rollout by Math-Verify and writes shards. Server, client and grading share the
processor, so what `build_table` adds slows generation down. The model is random and small; a larger one would make only
the generation slower. In addition to the seconds, the engine's share of the processor time during a build is measured:
on a machine with other users the ratio of the seconds is mostly noise, but this share still shows what a build adds.

Results: ``benchmarks/results/value_table_speed.json``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psutil
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer

from basis_rl.data import prompt_id
from basis_rl.engine import Sampling, prompt_tokens
from basis_rl.engine.client import _body, request_seed
from basis_rl.engine.server import Server, ServerOptions
from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.math.cache import Verdicts
from basis_rl.values.build import TablePlan, build_table
from basis_rl.values.sources import ServerSource
from benchmarks.common import parser_of, save
from tests.support.served import save_model


class Graded:
    """Math-Verify on a number computed from the rollout's tokens (rarely the same); a random model boxes nothing."""

    __name__ = "graded"

    def __init__(self) -> None:
        self.reward = MathVerifyReward()
        self.calls = 0

    def __call__(self, prompts: Any, completion_ids: Any, solution: Any, **kwargs: Any) -> list[float | None]:
        self.calls += len(prompts)
        return self.reward(prompts, [rf"\boxed{{{sum(ids) % 100_003}}}" for ids in completion_ids], solution)


def problems(n: int) -> Dataset:
    """`n` problems of about the same length."""
    texts = [f"What is {i} + {7 * i % 101} * {3 + i % 11}? Say it in words, then in digits." for i in range(n)]
    rows = [
        {"prompt": [{"role": "user", "content": text}], "solution": "7", "prompt_id": prompt_id(text)} for text in texts
    ]
    return Dataset.from_list(rows)


def raw(url: str, bodies: list[dict[str, Any]], in_flight: int) -> tuple[float, int]:
    """Seconds that the requests took, and the number of generated tokens."""
    host = urlsplit(url)

    def ask(body: bytes) -> bytes:
        connection = http.client.HTTPConnection(str(host.hostname), host.port, timeout=600)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        assert response.status == 200, answer
        return answer

    encoded = [json.dumps(body).encode() for body in bodies]
    began = time.perf_counter()
    with ThreadPoolExecutor(in_flight) as pool:
        answers = list(pool.map(ask, encoded))
    seconds = time.perf_counter() - began
    return seconds, sum(json.loads(answer)["usage"]["completion_tokens"] for answer in answers)


def cpu(server: int) -> tuple[float, float]:
    """Processor seconds used so far by the server with its workers, and by this process with its graders."""
    theirs, me = psutil.Process(server), psutil.Process()
    engine = {theirs, *theirs.children(recursive=True)}
    used = {each: sum(each.cpu_times()[:2]) for each in (me, *me.children(recursive=True))}
    return sum(used[each] for each in engine), sum(used[each] for each in used if each not in engine)


def forget(url: str) -> None:
    """Empty the server's prefix cache, so that no run benefits from an earlier one."""
    host = urlsplit(url)
    connection = http.client.HTTPConnection(str(host.hostname), host.port, timeout=60)
    connection.request("POST", "/reset_prefix_cache")
    assert connection.getresponse().status == 200
    connection.close()


def measure(url: str, server: int, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and processor time of the raw requests and of the table for each repeat, in alternating order."""

    def spent(before: tuple[float, float]) -> list[float]:
        return [now - then for now, then in zip(cpu(server), before, strict=True)]

    tokenizer = AutoTokenizer.from_pretrained(model)
    source = ServerSource([url], AutoConfig.from_pretrained(model), tokenizer)
    dataset, sampling = problems(options.prompts), Sampling(max_new_tokens=options.tokens)
    graded = Graded()
    plan = TablePlan(dataset=dataset, reward_funcs=[graded], sampling=sampling, num_rollouts=options.rollouts)
    bodies = [
        {
            **_body(sampling, options.rollouts, source.ends),
            "prompt": prompt_tokens(row["prompt"], tokenizer, {}),
            "seed": request_seed(plan.seed, 0, row["prompt_id"]),
        }
        for row in dataset
    ]
    in_flight = min(256, max(8, 1024 // options.rollouts))  # that of sample_servers
    raw(url, bodies[: in_flight // 2], in_flight)
    graded.reward(["", ""], [r"\boxed{1}", r"\boxed{2}"], ["3", "4"])  # its processes are started once
    rows = []
    for repeat in range(options.repeats):
        row: dict[str, Any] = {}
        for what in ("raw", "table") if repeat % 2 == 0 else ("table", "raw"):
            forget(url)
            before = cpu(server)
            if what == "raw":
                row["raw"], tokens = raw(url, bodies, in_flight)
                row["raw_cpu"] = spent(before)
                continue
            with tempfile.TemporaryDirectory() as folder:
                graded.reward._verdicts = Verdicts()  # as if each rollout were seen for the first time
                began = time.perf_counter()
                table = build_table(source, plan, Path(folder) / "table.partial")
                row["table"], row["table_cpu"] = time.perf_counter() - began, spent(before)
            assert table is not None
            row["tokens"] = table.provenance["tokens"]
        assert row["tokens"] == tokens, "not the same tokens"
        row["ratio"] = row["raw"] / row["table"]
        row["engine_share"] = row["table_cpu"][0] / sum(row["table_cpu"])
        rows.append(row)
        print(
            f"raw vLLM {row['raw']:.1f} s, table {row['table']:.1f} s for {tokens} tokens: "
            f"{tokens / row['raw']:.0f} and {tokens / row['table']:.0f} tokens/s, ratio {row['ratio']:.3f} "
            f"(processor: {row['raw_cpu'][0]:.1f} s of the engine and {row['raw_cpu'][1]:.1f} s of ours, "
            f"{row['table_cpu'][0]:.1f} s and {row['table_cpu'][1]:.1f} s: the engine has {row['engine_share']:.3f})",
            flush=True,
        )
    assert graded.calls == options.repeats * options.prompts * options.rollouts
    return {"rows": rows, "graded": graded.calls}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=48, help="number of prompts (48)")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts per prompt (16)")
    parser.add_argument("--tokens", type=int, default=256, help="maximum number of tokens per rollout (256)")
    parser.add_argument("--repeats", type=int, default=5, help="number of pairs of measurements (5)")
    options = parser.parse_args(argv)
    if options.quick:
        options.prompts, options.rollouts, options.tokens, options.repeats = 4, 2, 16, 1
    with tempfile.TemporaryDirectory() as temporary:
        model = save_model(Path(temporary) / "model", tied=False)
        engine = ("--max-num-seqs", "128", "--kv-cache-memory-bytes", str(64 << 20))
        server = ServerOptions(
            str(model), port=0, dtype="float32", max_model_len=512, log=Path(temporary) / "log", extra=engine
        )
        with Server(server) as running:
            assert running.process is not None
            found = measure(running.url, running.process.pid, model, options)
    medians = {}
    for key in ("ratio", "engine_share"):
        values = sorted(row[key] for row in found["rows"])
        medians[key] = median(values)
        print(f"{key}: median {medians[key]:.3f}, from {values[0]:.3f} to {values[-1]:.3f} ({len(values)} pairs)")
    results = {"settings": vars(options), "medians": medians, "load": os.getloadavg(), **found}
    if not options.quick:
        save("value_table_speed", results)
    return results


if __name__ == "__main__":
    main()
