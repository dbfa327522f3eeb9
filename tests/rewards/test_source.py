"""A reward is the code that it runs: the name may stay when that changes, and the code when the name does."""

import functools
import importlib
import sys

import pytest

from basis_rl.rewards import ExactReward
from basis_rl.rewards.source import code_identity

MODULE = """
import functools, re, math
LIMIT = 3
PATTERN = re.compile("a+")
calls = 0

def helper(text):
    return len(text) > LIMIT

def reward(completions, **kwargs):
    # a comment
    return [float(helper(c) and bool(PATTERN.match(c))) for c in completions]

def made(threshold):
    def inner(completions, **kwargs):
        return [float(len(c) > threshold) for c in completions]
    return inner

def scaled(scale):
    def decorator(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            return [scale * score for score in function(*args, **kwargs)]
        return inner
    return decorator

class Base:
    def score(self, text):
        return len(text)

class Judge(Base):
    def __init__(self, threshold=1):
        self.threshold = threshold
    def __call__(self, completions, **kwargs):
        return [float(self.score(c) > self.threshold) for c in completions]

decorated = scaled(1)(reward)
reward_of = lambda completions, **kwargs: [1.0 for _ in completions]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Imports the text as a module of this name, afresh."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = set()

    def load(text=MODULE, name="judging"):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        made.add(name)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        for cached in (tmp_path / "__pycache__").glob(f"{name}.*"):
            cached.unlink()
        return importlib.import_module(name)

    yield load
    for name in made:
        sys.modules.pop(name, None)


CHANGES = {
    "body": ("float(helper(c)", "2 * float(helper(c)", "reward"),
    "helper": ("len(text) > LIMIT", "len(text) >= LIMIT", "reward"),
    "constant": ("LIMIT = 3", "LIMIT = 4", "reward"),
    "pattern": ('"a+"', '"b+"', "reward"),
    "method": ("self.score(c) > self", "self.score(c) >= self", "Judge"),
    "base class": ("return len(text)\n", "return 2 * len(text)\n", "Judge"),
    "decorated": ("float(helper(c)", "2 * float(helper(c)", "decorated"),
    "lambda": ("[1.0 for", "[2.0 for", "reward_of"),
}


def reward_in(found, name):
    value = getattr(found, name)
    return value() if isinstance(value, type) else value


@pytest.mark.parametrize("case", CHANGES)
def test_what_a_reward_runs_is_part_of_it(case, module):
    old, new, name = CHANGES[case]
    before = code_identity(reward_in(module(), name))
    assert MODULE.count(old) == 1
    assert code_identity(reward_in(module(MODULE.replace(old, new)), name)) != before
    assert code_identity(reward_in(module(), name)) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [("    # a comment\n", ""), ("re, math", "math, re"), ("calls = 0", "calls = 7"),
     ("for c in completions]\n\ndef made", "for c\n            in completions]\n\ndef made")],
)  # fmt: skip
def test_what_it_does_not_run_is_not(old, new, module):
    before = code_identity(module().reward)
    assert MODULE.count(old) == 1
    assert code_identity(module(MODULE.replace(old, new)).reward) == before
    assert code_identity(module(MODULE, name="elsewhere").reward) == before


def test_what_it_was_made_with_counts(module):
    found = module()
    made = [found.made(1), found.made(2), found.Judge(1), found.Judge(2)]
    made += [found.scaled(scale)(found.reward) for scale in (1, 2)]
    made += [functools.partial(found.reward, strict=strict) for strict in (False, True)]
    assert len({code_identity(reward) for reward in made}) == len(made)
    assert code_identity(found.made(1)) == code_identity(found.made(1))


def test_a_version_decides_within_its_module(module):
    def versioned(text, version, name="judging"):
        found = module(text, name).reward
        found.version = version
        return code_identity(found)

    changed = MODULE.replace("len(text) > LIMIT", "len(text) >= LIMIT")
    assert versioned(MODULE, "1") == versioned(changed, "1")
    assert len({versioned(MODULE, "1"), versioned(MODULE, "2"), versioned(MODULE, "1", "other")}) == 3
    assert code_identity(ExactReward()).startswith("basis_rl ")


def test_without_a_source_it_is_its_module():
    scope = {"__name__": "typed"}
    exec("def reward(completions, **kwargs): return [1.0 for _ in completions]", scope)
    assert code_identity(scope["reward"]) == "typed"
    assert code_identity(max) == "builtins"


def test_a_closure_may_wait_for_what_is_assigned_later():
    """As a reward does that looks at the trainer it is given to."""

    def reward(completions, **kwargs):
        return [float(trainer is not None)] * len(completions)

    before = code_identity(reward)
    trainer = object()
    assert code_identity(reward) == before
    assert reward(["a"]) == [1.0]
