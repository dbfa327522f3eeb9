"""One benchmark from prompts to scores: sampled, graded, kept."""

from __future__ import annotations

import datetime
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from basis_rl.engine import Completion, Sampling
from basis_rl.evaluation.benchmarks import Problems
from basis_rl.evaluation.rollouts import GradedRollout, RolloutFile
from basis_rl.evaluation.scores import score
from basis_rl.rewards.call import call
from basis_rl.rewards.thought import AfterThought
from basis_rl.run.artefacts import write_whole
from basis_rl.run.record import RESULTS
from basis_rl.values.provenance import fingerprint

# Where completions come from: it is called with the tokens of the prompts, their keys, the sampling and the number of
# rollouts, and yields (index of the prompt, its completions) as they are ready. A source with a seed for each prompt
# derives it from the key, so that a prompt gets the same completions whichever others are asked for with it.
Generate = Callable[[Sequence[Sequence[int]], Sequence[str], Sampling, int], Iterator[tuple[int, list[Completion]]]]


class Evaluation:
    """A benchmark that is ready to be run: its file of rollouts opened.

    Args:
        problems: see `load_benchmark`.
        tokens: of its prompts (`prompt_tokens`).
        texts: of its prompts, as the model is given them.
        sampling: how rollouts are drawn.
        num_rollouts: per problem.
        folder: of the evaluation.
        settings: of the model and the prompts; those of sampling and problems are added.

    Raises:
        ValueError: the folder holds rollouts of other settings, or greedy decoding is asked for copies of one rollout.
    """

    def __init__(
        self,
        problems: Problems,
        tokens: list[list[int]],
        texts: list[str],
        sampling: Sampling,
        num_rollouts: int,
        folder: Path,
        settings: dict[str, Any],
    ) -> None:
        if sampling.temperature == 0 and num_rollouts > 1:
            same = f"at temperature 0 all {num_rollouts} rollouts of a problem would be the same"
            raise ValueError(f"{problems.name}: {same}. Set --temperature, or --num_rollouts 1.")
        self.problems = problems
        self.sampling = sampling
        self.num_rollouts = num_rollouts
        self.tokens = tokens
        self.texts = texts
        golds = [(row["prompt_id"], row["solution"]) for row in problems.dataset]
        known = {
            **settings,
            **asdict(sampling),
            "num_rollouts": num_rollouts,
            "source": dict(problems.benchmark.data),
            "problems": fingerprint(json.dumps(golds, ensure_ascii=False)),
        }
        self.file = RolloutFile(folder, problems.name, known)

    def run(self, generate: Generate, reward: Any) -> dict[str, Any]:
        """Draw what is missing, grade it, and score the whole (`score`, with ``settings``, ``date``, ``seconds``).

        Args:
            generate: draws the rollouts.
            reward: a reward function, by which a rollout with the full score is right. It may have methods of
                `MathVerifyReward`: ``answers`` (without it the answer is the whole rollout), ``plain``, ``equivalent``.
        """
        began = time.perf_counter()
        ids = list(self.problems.dataset["prompt_id"])
        with self.file.locked():
            kept = self.file.resume(ids, self.num_rollouts)
            if kept:
                done = f"{len(kept)} of {len(ids)} problems"
                print(f"{self.problems.name}: {done} have their rollouts already.", flush=True)
            if missing := [i for i, prompt_id in enumerate(ids) if prompt_id not in kept]:
                self._draw(generate, reward, missing)
            found = self.file.read()
        equivalent = getattr(reward, "equivalent", lambda pairs: [False] * len(pairs))
        return {
            **score({prompt_id: found[prompt_id] for prompt_id in ids}, equivalent),
            "settings": self.file.settings,
            "date": datetime.date.today().isoformat(),
            "seconds": round(time.perf_counter() - began, 1),
        }

    def is_complete(self) -> bool:
        """Whether every problem has all its rollouts."""
        found = self.file.read()
        return all(len(found.get(i, ())) == self.num_rollouts for i in self.problems.dataset["prompt_id"])

    def _draw(self, generate: Generate, reward: Any, missing: list[int]) -> None:
        keys = [self.problems.dataset[i]["prompt_id"] for i in missing]
        tokens = [self.tokens[i] for i in missing]
        total = len(missing) * self.num_rollouts
        results: Any = generate(tokens, keys, self.sampling, self.num_rollouts)
        # Closing aborts the requests that are in flight if something fails.
        with closing(results), tqdm(total=total, desc=self.problems.name, unit="rollout", mininterval=2) as progress:
            for index, completions in results:
                self.file.append(self._grade(missing[index], completions, reward))
                progress.update(len(completions))

    def _grade(self, index: int, completions: Sequence[Completion], reward: Any) -> list[GradedRollout]:
        row = self.problems.dataset[index]
        n = len(completions)
        texts = [completion.text for completion in completions]
        logged: dict[str, Any] = {"verdict": [None] * n}
        scores = call(reward, [row] * n, completions, logged)
        declared = getattr(reward, "reward_range", None)
        full = (declared or (0.0, 1.0))[1]
        beyond = [score for score in scores if score > full]
        # Of a declared range, rounding may leave a score just above its end.
        if declared is None and beyond:
            raise ValueError(
                f"A reward was {beyond[0]:g}, and only the full score counts as right: 1, as no range is declared. "
                "Declare its range: `my_reward.reward_range = (0, 10)`."
            )
        cut = [[completion.truncated for completion in completions]] if isinstance(reward, AfterThought) else []
        answers = reward.answers(texts, [row["prompt"]] * n, *cut) if hasattr(reward, "answers") else texts
        plain = reward.plain(texts, [row["solution"]] * n) if hasattr(reward, "plain") else [None] * n
        # Of any reward function, which may have logged something else than a text for each rollout.
        said = [None if verdict is None else str(verdict) for verdict in [*logged["verdict"], *[None] * n][:n]]
        graded = zip(completions, answers, scores, plain, said, strict=True)
        return [
            GradedRollout(
                prompt_id=row["prompt_id"],
                rollout=k,
                level=row["level"],
                prompt=self.texts[index],
                completion=completion.text,
                answer=answer,
                gold=row["solution"],
                reward=None if math.isnan(value) else float(value >= full),
                truncated=completion.truncated,
                tokens=len(completion.token_ids),
                plain=by_plain_rules,
                verdict=verdict,
            )
            for k, (completion, answer, value, by_plain_rules, verdict) in enumerate(graded)
        ]


def save_results(folder: Path, results: dict[str, Any]) -> None:
    """Add the results of these benchmarks to ``results.json``."""
    path = folder / RESULTS
    everything = json.loads(path.read_text()) if path.is_file() else {}
    # Results of other benchmarks, from earlier calls, stay.
    everything.update(results)
    write_whole(path, json.dumps(everything, indent=2) + "\n")
