"""The adapter of OpenEnv against servers made with OpenEnv's own classes, on this machine."""

import gc
import json
import threading
import time

import pytest
from transformers.utils.chat_template_utils import get_json_schema

pytest.importorskip("openenv", reason="needs OpenEnv: `pip install openenv`")

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

from basis_rl.environments import openenv


class Guess(MCPEnvironment):
    """A number is to be guessed; the reward of each guess is its share of the right one."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("guess")

        @mcp.tool
        def guess(number: int) -> str:
            """Guess the number.

            Args:
                number: The guess.
            """
            if number < 0:
                raise ValueError("There are no negative ones.")
            self.last = number
            return "right" if number == self.secret else "wrong"

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, split=None, index=None, **given):
        self.secret = seed if index is None else index
        self.last = None
        return Observation(metadata={"task": f"Guess a number below {self.secret + 1}."})

    async def step_async(self, action, **given):
        seen = await super().step_async(action, **given)
        if isinstance(action, CallToolAction) and self.last is not None:
            seen.reward = self.last / self.secret
            seen.done = self.last == self.secret
        return seen

    def _step_impl(self, action, **given):
        raise NotImplementedError

    @property
    def state(self):
        return State()

    def num_tasks(self, split):
        return {"train": 3}.get(split, 0)


class Word(Action):
    """Say a word."""

    word: str


class Board(Observation):
    board: str


class Echo(Environment):
    """Without MCP: its actions are records."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **given):
        return Board(board="empty")

    def step(self, action, timeout_s=None, **given):
        return Board(board=action.word, reward=0.5)

    @property
    def state(self):
        return State()


def served(*app, sessions=2):
    server = uvicorn.Server(
        uvicorn.Config(create_fastapi_app(*app, max_concurrent_envs=sessions), port=0, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", server, thread


def ended(server, thread):
    server.force_exit = server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def guess():
    url, server, thread = served(Guess, CallToolAction, CallToolObservation, sessions=40)
    yield url
    ended(server, thread)


def test_tools_reset_and_reward_are_the_servers(guess):
    environment = openenv.environment(guess, text_field="metadata.task")
    told = get_json_schema(environment.guess)["function"]
    assert told["description"] == "Guess the number."
    assert told["parameters"]["properties"] == {"number": {"type": "integer", "description": "The guess."}}
    assert environment.reset(reset='{"seed": 4}', prompt="not sent") == "Guess a number below 5."
    assert environment.get_reward() == 0, "an episode without a step"
    assert environment.guess(number=1) == "wrong"
    with pytest.raises(RuntimeError, match="no negative"):
        environment.guess(number=-1)
    assert environment.guess(number=4) == "right"
    assert environment.guess(number=1) == "The episode has ended."
    assert environment.get_reward() == pytest.approx(0.25 + 0.25 + 1)
    environment.reset(reset={"seed": 2, "index": None})
    assert environment.get_reward() == 0


def test_sessions_do_not_share_an_episode(guess):
    first, second = openenv.environment(guess), openenv.environment(guess)
    assert type(first) is type(second), "TRL tells environments apart by their class"
    first.reset(reset={"seed": 1})
    second.reset(reset={"seed": 2})
    assert (first.guess(number=1), second.guess(number=1)) == ("right", "wrong")


def test_the_rewards_of_turns(guess):
    environment = openenv.environment(guess, turn_rewards=True)
    environment.reset(reset={"seed": 4})
    environment.guess(number=1)
    environment.guess(number=2)
    environment.turn_index = 2
    environment.guess(number=4)
    assert environment.get_reward() == [0.75, 0.0, 1.0]


def test_each_task_is_a_row_with_an_id(guess):
    resets = openenv.tasks(guess, "train")
    rows = openenv.dataset(resets, prompt="Play.", system_prompt="Briefly.")
    assert [json.loads(text) for text in rows["reset"]] == [{"split": "train", "index": index} for index in range(3)]
    assert len(set(rows["prompt_id"])) == 3
    assert rows["prompt_id"] == openenv.dataset(resets, "Play.", "Briefly.")["prompt_id"]
    environment = openenv.environment(guess)
    assert environment.reset(**rows[1]) is None, "metadata is not for the model"
    assert environment.guess(number=1) == "right"


def test_actions_without_mcp_are_one_tool():
    url, server, thread = served(Echo, Word, Board)
    environment = openenv.environment(url)
    told = get_json_schema(environment.act)["function"]
    assert told["description"] == "Say a word."
    assert list(told["parameters"]["properties"]) == ["word"]
    assert environment.reset() == "empty"
    assert environment.act(word="hello") == "hello"
    with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
        environment.act(wrong="hello")
    assert environment.get_reward() == 0.5, "a wrong call is the model's mistake"
    with pytest.raises(ValueError, match="lists no tasks"):
        openenv.tasks(url)
    ended(server, thread)


def test_a_server_that_dies_gives_no_reward_and_is_told():
    url, server, thread = served(Echo, Word, Board, sessions=1)
    environment, other = openenv.environment(url), openenv.environment(url)
    wrong = openenv.environment(url, text_field="wrong")
    with pytest.raises(ValueError, match="no 'wrong'"):
        wrong.reset()
    with pytest.raises(RuntimeError, match="max_concurrent_envs"):
        environment.reset()
    del wrong
    gc.collect()
    environment.reset()
    with pytest.raises(RuntimeError, match="max_concurrent_envs"):
        other.reset()
    environment.act(word="hello")
    ended(server, thread)
    for _ in range(2):
        with pytest.raises(Exception):  # noqa: B017, PT011
            environment.act(word="hello")
    assert environment.get_reward() is None
    with pytest.raises(ValueError, match="No OpenEnv server answers"):
        openenv.environment(f"{url}/", timeout=5.0)
    with pytest.raises(RuntimeError, match="did not begin"):
        environment.reset()
