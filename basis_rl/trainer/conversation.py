"""One rollout of a stream, with all its turns: TRL's own loop over tools, for one conversation in its own thread."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOTrainer

from basis_rl.environments import NO_PROMPT, tool_methods, with_said
from basis_rl.trainer import turns

# An id's completion: ``ask(token ids of the prompt, most tokens)`` -> its ids, log-probabilities and policies.
Ask = Callable[[list[int], int], Mapping[str, Any]]


@dataclass
class StreamedRollout:
    """What became of one rollout.

    Attributes:
        prompt: as the model was given it, with what an environment said at first.
        prompt_ids, completion_ids: tokens; a completion has those of tools, too.
        log_probs: of each token of the completion by the policy that drew it; 0 for those of tools.
        steps: optimizer step of that policy, for each token of the completion.
        tool_mask: 1 for tokens of the policy, 0 for those of tools.
        completion: messages, or the text.
        calls, failed_calls: of tools.
        rewards: one for each reward function, NaN where there is none.
        turn_rewards: of each reward function, the rewards of turns; empty where it gives none.
        logged: what reward functions have logged of it: columns of the table of rollouts.
        failure: why it could not be scored; empty if it was.
    """

    prompt: Any
    prompt_ids: list[int]
    completion_ids: list[int]
    log_probs: list[float]
    steps: list[int]
    tool_mask: list[int]
    completion: Any
    calls: int = 0
    failed_calls: int = 0
    rewards: list[float] = field(default_factory=list)
    turn_rewards: list[list[float]] = field(default_factory=list)
    logged: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


class Environments:
    """Instances that are not in use: made once, reset for each rollout.

    Args:
        factories: by name, as TRL's trainer has them; None without environments.
    """

    def __init__(self, factories: Mapping[str | None, Callable[[], Any]] | None) -> None:
        self.factories = factories
        self._free: dict[str | None, list[Any]] = defaultdict(list)

    def taken(self, name: str | None) -> Any:
        """One that nobody has."""
        assert self.factories is not None
        try:
            return self._free[name].pop()
        except IndexError:
            return self.factories[name]()

    def give_back(self, name: str | None, environment: Any) -> None:
        """It may be reset from now on."""
        self._free[name].append(environment)


class Conversation:
    """One rollout while it is drawn. It is `self` for those methods of TRL's trainer that hold the loop over turns, and
    has what of their state belongs to a rollout; everything else is the trainer's.

    Args:
        trainer: the run.
        row: of the dataset.
        tokenizer: one that no other thread changes.
        pool: environments that are not in use.
        ask: sends a request to the server.

    Attributes:
        phase: what the rollout is waiting for: ``environment``, ``server``, ``tools`` or ``reward``.
    """

    def __init__(self, trainer: Any, row: Mapping[str, Any], tokenizer: Any, pool: Environments, ask: Ask) -> None:
        self._trainer = trainer
        self._row = row
        self._pool = pool
        # The trainer's own is taken away while it serves rollouts that have ended.
        self.environment_factories = pool.factories
        self._ask = ask
        self._tokenizer = tokenizer
        self.processing_class = tokenizer
        self.steps: list[int] = []
        self.failed_calls = 0
        self.phase = "environment"
        self.environments: list[Any] | None = None
        self._chosen_environment = row.get("environment") if trainer._multi_environment else None
        self._batch_environments = [self._chosen_environment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def rolled_out(self) -> StreamedRollout:
        """The rollout, without its rewards."""
        prompt = self._begun()
        ((prompt_ids,), _, _) = GRPOTrainer._tokenize_prompts(self, [prompt])
        completion_ids, log_probs = self._generate_single_turn([prompt_ids], None, {}, 1)
        completions: list[Any] = [self._read(prompt, prompt_ids, completion_ids[0])]
        mask = [[1] * len(completion_ids[0])]
        calls = failures = 0
        if self.tools:
            # TRL adds later turns to the prompt.
            prompts = [copy.deepcopy(prompt)]
            found = GRPOTrainer._tool_call_loop(
                self, prompts, [prompt_ids], completion_ids, completions, log_probs, None, {}
            )
            mask, completions, completion_ids, log_probs, calls, failures, _ = found
        return StreamedRollout(
            prompt=prompt,
            prompt_ids=prompt_ids,
            completion_ids=completion_ids[0],
            log_probs=log_probs[0],
            steps=self._steps_of(mask[0]),
            tool_mask=mask[0],
            completion=completions[0],
            calls=calls,
            failed_calls=failures + self.failed_calls,
        )

    def unscored(self, failure: str) -> StreamedRollout:
        """In place of a rollout that has failed: its prompt and an end token, which nothing is learnt from."""
        prompt = self._row.get("prompt", list(NO_PROMPT))
        ((prompt_ids,), _, _) = GRPOTrainer._tokenize_prompts(self, [prompt])
        completion = "" if isinstance(prompt, str) else [{"role": "assistant", "content": ""}]
        end = [self._tokenizer.eos_token_id]
        return StreamedRollout(prompt, prompt_ids, end, [0.0], [], [0], completion, failure=failure)

    def close(self) -> None:
        """Its environment may be used again."""
        for each in self.environments or []:
            self._pool.give_back(self._chosen_environment, each)

    def _begun(self) -> Any:
        """The prompt. With environments, a new one is reset, and what it says first is added to the last message."""
        prompt = copy.deepcopy(self._row.get("prompt", list(NO_PROMPT)))
        methods: list[Any] = []
        if self.environment_factories is not None:
            environment = self._pool.taken(self._chosen_environment)
            self.environments = [environment]
            methods = tool_methods(environment)
            hidden = {"environment"} if self._multi_environment else set()
            said = environment.reset(**{key: value for key, value in self._row.items() if key not in hidden})
            turns.count_turn(self.environments, is_first=True)
            prompt = with_said(prompt, said)
        tools = {tool.__name__: tool for tool in [*self._standalone_tools, *methods]}
        later = {name: tool for name, tool in tools.items() if inspect.iscoroutinefunction(tool)}
        self._sync_tool_dicts = [{name: tool for name, tool in tools.items() if name not in later}]
        self._async_tool_dicts = [later]
        return prompt

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, fields: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """In TRL's place: the next turn of this conversation, as long as there is room for it."""
        if not self.steps:
            self._longest = len(prompt_ids[0]) + self.max_completion_length
        else:
            turns.count_turn(self.environments)
        most = self._longest - len(prompt_ids[0])
        if most < 1:
            return [[]], [[]]
        self.phase = "server"
        answer = self._ask(prompt_ids[0], most)
        self.phase = "tools"
        self.steps += answer["steps"]
        return [answer["completion_ids"]], [answer["logprobs"]]

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
        self.failed_calls += turns.settled_answers(tool_messages, self._tokenizer.all_special_tokens)
        found: list[int] = GRPOTrainer._get_tool_suffix_ids(self, tool_messages)
        return found

    def _read(self, prompt: Any, prompt_ids: list[int], ids: list[int]) -> Any:
        """The first turn as TRL reads it."""
        if isinstance(prompt, str):
            return self._tokenizer.decode(ids, skip_special_tokens=True)
        if any(getattr(self._tokenizer, name, None) for name in ("response_template", "response_schema")):
            return [turns.read_turn(self._tokenizer, ids, prefix=prompt_ids, tools=self.tools)]
        return [{"role": "assistant", "content": self._tokenizer.decode(ids, skip_special_tokens=True)}]

    def _steps_of(self, mask: list[int]) -> list[int]:
        """The policy of each token; a tool's has that of the model's token before it."""
        drawn = iter(self.steps)
        found: list[int] = []
        for own in mask:
            found.append(next(drawn) if own else found[-1])
        return found
