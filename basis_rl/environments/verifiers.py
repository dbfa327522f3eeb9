"""Tasksets of the library verifiers (v1): tasks as a dataset, tool servers as methods, rewards and judges as a reward.

What its harnesses and environments do has no counterpart: conversations with a simulated user (`Env.run`), sandboxes
(runtimes), agent programs, `@vf.stop` and `@vf.intercept`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from importlib.metadata import version
from statistics import fmean
from typing import Any

from datasets import Dataset

from basis_rl.environments.mcp import tool_method
from basis_rl.names import require_extra
from basis_rl.rewards.base import Column, Completions, LogMetric, Scores, Truncated
from basis_rl.rewards.workers.failures import FailureMonitor

# The state of the rollout whose tool is called: one server may serve several.
_STATE: ContextVar[Any] = ContextVar("state")
_log = logging.getLogger(__name__)


def dataset(taskset: str, config: Mapping[str, Any] | None = None, limit: int | None = None) -> Dataset:
    """One row for each task.

    Args:
        taskset: name of a module that exports a `Taskset`, as verifiers takes it.
        config: of the taskset.
        limit: the most tasks; needed if the taskset never ends.

    Returns:
        Columns ``prompt`` (a conversation), ``task`` and ``prompt_id`` (verifiers' key of the task), and the task's own
        fields that are numbers or texts.

    Raises:
        ValueError: the extra is not installed, there is no such taskset, or it needs what this adapter does not have.
    """
    import verifiers.v1 as vf

    rows = []
    for key, task in _tasks(taskset, _written(config), limit).items():
        own = {
            name: getattr(task.data, name)
            for name in type(task.data).model_fields
            if name not in vf.TaskData.model_fields
        }
        plain = {name: value for name, value in own.items() if isinstance(value, str | int | float)}
        rows.append({**plain, "prompt": _prompt(task.data), "task": key, "prompt_id": key})
    return Dataset.from_list(rows)


def environment(taskset: str, config: Mapping[str, Any] | None = None, limit: int | None = None) -> Any:
    """An environment for TRL's ``environment_factory``: the tools of a taskset.

    Its tool servers run in this process, in a background thread. It gives no reward: add `VerifiersReward`. The
    arguments are those of `dataset`.

    Raises:
        ValueError: see `dataset`.
    """
    return _class_of(taskset, _written(config), limit)()


class VerifiersReward:
    """The sum of a task's rewards and judges, weighted as it says, beside an `environment` or without one.

    Metrics: ``reward/verifiers/NAME``, the mean of each reward and metric. A rollout whose scoring fails has no reward
    (None); with many of them the run ends (`FailureMonitor`).

    Args:
        taskset, config, limit: see `dataset`.

    Raises:
        ValueError: see `dataset`; or the tasks have no rewards.
    """

    __name__ = "verifiers"

    def __init__(self, taskset: str, config: Mapping[str, Any] | None = None, limit: int | None = None) -> None:
        self._tasks = _tasks(taskset, _written(config), limit)
        first = next(iter(self._tasks.values()))
        if not first.hooks("reward") and not first.plugged_judges():
            raise ValueError(
                f"The tasks of '{taskset}' have no rewards. Name others by config: {{task: {{rewards: ...}}}}."
            )
        self.version = f"verifiers {version('verifiers')}, {taskset} {_written(config)}"
        self._failures = FailureMonitor(f"The taskset '{taskset}'")

    def __call__(
        self,
        prompts: Column,
        completions: Completions,
        task: Column,
        environments: Sequence[Any] | None = None,
        truncated: Truncated = None,
        log_metric: LogMetric = None,
        **kwargs: Any,
    ) -> Scores:
        played = environments or [None] * len(task)
        ended = truncated or [False] * len(task)
        # Rows of another environment have no task.
        mine = [index for index, key in enumerate(task) if key is not None]
        rollouts = [(prompts[i], completions[i], task[i], played[i], ended[i]) for i in mine]
        traces = _wait(_together([self._scored(*rollout) for rollout in rollouts]))
        failed = [str(each) for each in traces if isinstance(each, Exception)]
        self._failures.record(len(traces) - len(failed), len(failed), "; ".join(failed[:1]))
        scores: Scores = [None] * len(task)
        noted = defaultdict(list)
        for index, trace in zip(mine, traces, strict=True):
            if not isinstance(trace, Exception):
                scores[index] = trace.reward
                for name, value in {**trace.metrics, **{k: v.score for k, v in trace.rewards.items()}}.items():
                    noted[name].append(value)
        if log_metric is not None:
            for name, values in noted.items():
                log_metric(f"reward/verifiers/{name}", fmean(values))
        return scores

    async def _scored(self, prompt: Any, completion: Any, key: str, environment: Any, is_cut: bool) -> Any:
        """The rollout as verifiers records it, with its rewards."""
        task = self._tasks[key]
        trace = environment._trace if isinstance(environment, _Taskset) else await _begun(task)
        _record(trace, prompt, completion, is_cut)
        await _hook(task.finalize, trace)
        await task.score(trace, _NoRuntime())
        return trace


class _Taskset:
    """The tools of one rollout; subclasses have those of a taskset."""

    _tasks: Mapping[str, Any]
    # Servers that all rollouts share, by the name that stands before their tools' names.
    _shared: Mapping[str, Any]
    _places: Mapping[str, tuple[str, str]]

    def __init__(self) -> None:
        self._trace: Any = None
        self._own: dict[str, Any] = {}
        self._toolsets: list[Any] = []

    def reset(self, task: str, **row: Any) -> None:
        """Set up a task and its tool servers."""
        _wait(self._set_up(self._tasks[task]))

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content

        server, tool = self._places[name]

        result = _wait(self._within({**self._shared, **self._own}[server].call_tool, tool, arguments))
        text = str(mcp_content_to_chat_content(result.content))
        if result.is_error:
            raise RuntimeError(text)
        return text

    async def _within(self, work: Callable[..., Any], *arguments: Any) -> Any:
        _STATE.set(self._trace.state)
        return await work(*arguments)

    async def _set_up(self, task: Any) -> None:
        for toolset in self._toolsets:
            await toolset._exit_stack.aclose()
        self._trace = await _begun(task)
        self._toolsets = task.toolsets(task.config)
        self._own = await _served(self._toolsets, task)


@functools.cache
def _class_of(taskset: str, config: str, limit: int | None) -> type[_Taskset]:
    tasks = _tasks(taskset, config, limit)
    loaded = _loaded(taskset, config)
    first = next(iter(tasks.values()))
    shared = _wait(_served(loaded.toolsets(loaded.config)))
    made: Any = type("Verifiers", (_Taskset,), {"_tasks": tasks, "_shared": shared})
    probe = made()
    _wait(probe._set_up(first))
    places: dict[str, tuple[str, str]] = {}
    for server, mcp in {**shared, **probe._own}.items():
        for tool in _wait(probe._within(mcp.list_tools)):
            name = f"{server}_{tool.name}" if server else tool.name
            places[name] = (server, tool.name)
            setattr(made, name, tool_method(name, tool.description, tool.input_schema))
    if not places:
        raise ValueError(f"The taskset '{taskset}' has no tools. Train on `dataset` with `VerifiersReward` alone.")
    made._places = places
    found: type[_Taskset] = made
    return found


async def _served(toolsets: Sequence[Any], task: Any = None) -> dict[str, Any]:
    """MCP servers of toolsets, within this process, by the name that stands before their tools' names."""
    from mcp.server.mcpserver import MCPServer

    async def state() -> Any:
        return _STATE.get()

    servers = {}
    for toolset in toolsets:
        name = toolset.server_name
        config = toolset.config
        if getattr(config, "url", None) or config.runtime.type != "subprocess":
            raise ValueError(f"The tool server '{name}' runs in a sandbox or elsewhere, which does not work here.")
        # Elsewhere it asks the host for it.
        toolset._pull_state = state
        await toolset.setup()
        if task is not None:
            await toolset.setup_task(task.data)
        servers[name] = MCPServer(name or type(toolset).__name__)
        toolset.register(servers[name])
    return servers


async def _begun(task: Any) -> Any:
    """The record of a new rollout of a task that is set up."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    named = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace = vf.Trace(task=named, state=state_cls(type(task))(), agent=vf.AgentInfo(config=vf.AgentConfig()))
    await _hook(task.setup, trace)
    return trace


def _record(trace: Any, prompt: Any, completion: Any, is_cut: bool) -> None:
    """Write a rollout into its record, message by message."""
    import verifiers.v1 as vf

    # A rollout may be scored again.
    trace.nodes.clear()
    trace.calls.clear()
    calls: list[Any] = []
    said = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    for message in [*prompt, *said]:
        role, content = message["role"], message.get("content") or ""
        is_sampled = len(trace.nodes) >= len(prompt)
        if role == "assistant":
            named = [call["function"] for call in message.get("tool_calls") or []]
            calls = [
                vf.ToolCall(id=f"{len(trace.nodes)}.{place}", name=each["name"], arguments=_written(each["arguments"]))
                for place, each in enumerate(named)
            ]
            thought = message.get("reasoning_content")
            entry: Any = vf.AssistantMessage(content=content, reasoning_content=thought, tool_calls=calls or None)
        elif role == "tool":
            # The answers stand in the order of the calls.
            call = calls.pop(0).id if calls else ""
            entry = vf.ToolMessage(tool_call_id=call, name=message.get("name"), content=content)
        else:
            entry = vf.SystemMessage(content=content) if role == "system" else vf.UserMessage(content=content)
        parent = len(trace.nodes) - 1 if trace.nodes else None
        trace.nodes.append(vf.MessageNode(parent=parent, message=entry, sampled=is_sampled and role == "assistant"))
    trace.calls.append(vf.ModelCall(node=len(trace.nodes) - 1, finish_reason="length" if is_cut else "stop"))
    trace.stop("agent_completed")


def _prompt(data: Any) -> list[dict[str, Any]]:
    """A task's conversation before the model's first turn."""
    texts = {"role": "user", "content": data.prompt}
    messages = [texts] if isinstance(data.prompt, str) else [each.model_dump(exclude_none=True) for each in data.prompt]
    if any(not isinstance(each["content"], str) for each in messages):
        raise ValueError(f"The prompt of the task {data.name or data.idx} is not only text, which does not work here.")
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, *messages]


@functools.cache
def _loaded(taskset: str, config: str) -> Any:
    """A taskset, if it can be used without what stands in the docstring of this module."""
    require_extra("verifiers", "A taskset of verifiers")
    import verifiers.v1 as vf

    try:
        own = vf.environment_class(taskset)
        loaded = vf.load_taskset(vf.taskset_config_type(taskset).model_validate({**json.loads(config), "id": taskset}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"The taskset '{taskset}' cannot be loaded: {error}") from error
    if own is not vf.SingleAgentEnv:
        raise ValueError(
            f"The taskset '{taskset}' has an environment of its own, {own.__name__}, which leads the conversation "
            "(`Env.run`). Here only the model's tool calls can continue one. Take another taskset."
        )
    return loaded


@functools.cache
def _tasks(taskset: str, config: str, limit: int | None) -> dict[str, Any]:
    """The tasks by their keys."""
    loaded = _loaded(taskset, config)
    if limit is not None:
        loaded = loaded.take(limit)
    if not loaded.bounded:
        raise ValueError(f"The taskset '{taskset}' never ends: set limit, the number of tasks to take.")
    listed = list(loaded)
    tasks = {task.key: task for task in listed}
    if len(tasks) < len(listed) or not tasks:
        raise ValueError(
            f"The taskset '{taskset}' has {len(listed)} tasks with {len(tasks)} keys; it needs one key for each."
        )
    if any(task.NEEDS_CONTAINER or task.data.prompt is None for task in listed):
        raise ValueError(f"Tasks of '{taskset}' need a container or a simulated user, which do not work here.")
    return tasks


class _NoRuntime:
    """Says what is missing if a task uses it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"The task uses its runtime, a sandbox of verifiers ({name}), which does not work here.")


async def _hook(hook: Callable[..., Any], trace: Any) -> None:
    """Call ``setup`` or ``finalize`` with those arguments that it names."""
    given = {"trace": trace, "runtime": _NoRuntime()}
    await hook(**{name: given[name] for name in inspect.signature(hook).parameters if name in given})


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for all environments, since tool servers belong to the loop that they began in."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


def _wait(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


async def _together(works: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*works, return_exceptions=True)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value or {}, sort_keys=True)
