"""CodeReward: right programs pass, and no way of not solving the problem does."""

import json
import time
import tracemalloc
from pathlib import Path

import pytest

from basis_rl.rewards import CodeReward
from basis_rl.rewards.code import reward as code_reward
from basis_rl.rewards.code import run as code_run
from basis_rl.rewards.code.blocks import last_code
from basis_rl.rewards.code.harness import Approx, Unsupported, decode, encode
from basis_rl.rewards.code.tests import Case, _near, choose_cases, parse_tests, same_output, same_value
from basis_rl.rewards.workers.failures import RewardInfrastructureError
from basis_rl.sandbox import Isolation, isolation
from basis_rl.sandbox import run as sandbox_run

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

ADD_IO = json.dumps({"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]})
ADD_CALL = {"fn_name": "add", "inputs": [[1, 2], [30, 4]], "outputs": [3, 34]}
ADD_ASSERT = ["assert add(1, 2) == 3", "assert add(30, 4) == 34"]
ADD_CHECK = {"test": "def check(candidate):\n    for got in map(candidate, [1], [2]):\n        assert got == 3\n"
             "    assert add(30, 4) == 34\n",
             "entry_point": "add"}  # fmt: skip

needs_sandbox = pytest.mark.skipif(not isolation().complete, reason="this machine cannot shut in what a model writes")


def fenced(source):
    return f"I think so.\n```python\n{source}\n```\nDone."


@pytest.fixture(scope="module")
def reward():
    return CodeReward(num_workers=2, timeout=0.5, memory_bytes=1 << 28)


def scores(reward, pairs):
    return reward([], [fenced(source) for source, _ in pairs], solution=[tests for _, tests in pairs])


@needs_sandbox
def test_right_programs_pass_in_every_form_of_tests(reward):
    function = "def add(a, b):\n    return a + b"
    method = "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        return a + b"
    programs = [
        ("a, b = map(int, input().split())\nprint(a + b)", ADD_IO),
        ("import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))", ADD_IO),
        (function, ADD_CALL),
        (method, json.dumps(ADD_CALL)),
        (function, ADD_ASSERT),
        (method, ADD_ASSERT),
        (function, ADD_CHECK),
        ("def add(a, b):\n    print('noise')\n    return a + b", ADD_CHECK),
        ("def add(a, b):\n    raise ValueError",
         ["try:\n    add(1, 2)\nexcept ValueError:\n    pass\nelse:\n    assert 0"]),
        ("def swap(t, s, d):\n    return {'t': (t[1], t[0]), 's': s, 1: d[2 ** 100]}",
         ["assert swap((1, 2), {3}, {2 ** 100: b'x'}) == {'t': (2, 1), 's': {3}, 1: b'x'}"]),
        ("def up(n):\n    yield from range(n)", ["assert list(up(3)) == [0, 1, 2]"]),
        ("def up(n):\n    while True:\n        yield n", ["assert list(zip(up(3), 'ab')) == [(3, 'a'), (3, 'b')]"]),
    ]  # fmt: skip
    assert scores(reward, programs) == [1.0] * len(programs)


# As the field's sites run them: LeetCodeDataset, LiveCodeBench and MBPP+.
OF_SITES = "inputs = [[1, 2], [3, 4]]\nfor x, want in zip(inputs, [3, 7]):\n    assert add(*x) == want"


@needs_sandbox
def test_programs_run_as_on_the_sites_that_they_are_written_for(reward):
    method = "class Solution:\n    def add(self, a, b):\n        return {}"
    deep = "def add(a, b):\n    return b if a == 0 else 1 + add(a - 1, b)"
    programs = [
        ("a, b = map(int, input().split())\nif a == 1:\n    print(3)\n    exit()\nprint(34)\nquit()", ADD_IO),
        ("exit(1)", ADD_IO),
        (method.format("next(accumulate([a + b])) + len(set(ascii_lowercase) & set('A')) + int(log(1))"), ADD_CALL),
        (method.format("deepcopy([x + y for x, y in pairwise([a, b])])[0] * pow(a, 0, 7)"), ADD_CALL),
        ("def add(a, b):\n    return a + b", OF_SITES),
        ("def add(a, b):\n    return 3", OF_SITES),
        (deep, ["assert add(5000, 1) == 5001"]),
    ]
    assert scores(reward, programs) == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]


@needs_sandbox
def test_names_that_programs_have_are_no_answer_for_functions_that_they_lack(reward):
    programs = [("x = 1", ["assert list(pairwise([1, 2])) == [(1, 2)]"]), ("x = 1", ["assert log10(10) == 1"]),
                ("def count(x): return 5", ["assert count(3) == 5"])]  # fmt: skip
    assert scores(reward, programs) == [0.0, 0.0, 1.0]


@needs_sandbox
def test_arguments_by_name_in_one_text_are_not_taken_for_one_argument(reward):
    named = {"fn_name": "f", "inputs": ["nums = [3,1], k = 2"], "outputs": ["4"]}
    assert reward.check_golds([named, {**named, "inputs": ["nums"]}, "x = 1"]) == [0, 2]


WRONG = CASES["wrong"]


@needs_sandbox
@pytest.mark.parametrize(
    "tests",
    [ADD_CALL, ADD_CHECK, *(form for form in CASES["forms"].values() if "Solution" not in json.dumps(form))],
)
def test_what_does_not_solve_the_problem_does_not_pass(reward, tests):
    got = scores(reward, [(source, tests) for source in WRONG.values()])
    assert [name for name, score in zip(WRONG, got, strict=True) if score != 0.0] == []


@needs_sandbox
def test_hostile_programs_end_and_reach_nothing(reward, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    (tmp_path / "answer").write_text("3\n")
    programs = [
        "while True: pass",
        "import time\ntime.sleep(1000)",
        "x = [bytearray(1 << 20) for _ in range(1 << 20)]",
        "import os, time\nfor _ in range(400):\n    if os.fork() == 0: time.sleep(60)",
        "while True: print('x' * 1000)",
        f"open({str(mark)!r}, 'w').write('x')",
        f"print(open({str(tmp_path / 'answer')!r}).read())",
        "import socket\nsocket.create_connection(('127.0.0.1', 80), 1)",
        "import os\nprint(3 if 'SECRET_OF_TRAINER' in os.environ else 0)",
        "import subprocess\nprint(subprocess.run(['cat', '/etc/passwd'], capture_output=True).returncode * 0 + 3 - 4)",
        "print(input() and 3)\nraise SystemExit(1)",
    ]
    monkeypatch.setenv("SECRET_OF_TRAINER", "1")
    logged = {}
    began = time.perf_counter()
    cells = [{"inputs": ["1 2"], "outputs": ["3"]}] * len(programs)
    got = reward([], list(map(fenced, programs)), solution=cells, log_metric=logged.__setitem__)
    assert got == [0.0] * len(programs)
    assert logged["reward/code/timeout"] >= 2 / len(programs)
    assert time.perf_counter() - began < 60
    assert not mark.exists()


@needs_sandbox
def test_share_of_tests_and_rows_that_cannot_be_scored():
    reward = CodeReward(num_workers=2, partial=True)
    logged = {}
    right, half = fenced("def add(a, b):\n    return a + b"), fenced("def add(a, b):\n    return 3")
    unfit = ["no tests", ["assert add(object(), 1)"], ["import no_such\nassert add(1, 1)"]]
    cells = [ADD_ASSERT, ADD_ASSERT, ADD_CALL, *unfit]
    texts = [right, half, half, right, right, right]
    got = reward([], texts, tests=None, solution=cells, log_metric=logged.__setitem__)
    assert got == [1.0, 0.5, 0.5, None, None, None]
    assert logged["reward/code/unscored"] == 0.5
    assert reward.check_golds(cells) == [3, 4, 5]
    assert reward([], [right], solution=[["assert 1 + 1 == 2"]]) == [None]  # which says nothing of the code
    assert reward([], ["no code", "```python\nopen"], solution=[ADD_CALL] * 2) == [0.0, 0.0]


@needs_sandbox
def test_tests_and_the_functions_name_in_columns_of_their_own():
    reward = CodeReward(num_workers=1, column="tests", fn_name="name")
    cell = [{"input": "[1]\n[2]", "output": "[1, 2]", "testtype": "functional"}]
    text = fenced("def join(a, b):\n    return a + b")
    assert reward([], [text] * 2, solution=["irrelevant"] * 2, tests=[cell] * 2, name=["join", "other"]) == [1.0, 0.0]
    assert reward.gold_columns == ["tests", "name", "prompt"]
    assert reward.check_golds([cell, cell, "irrelevant"], ["join", None, "join"]) == [1, 2]
    check = "def check(candidate):\n    assert candidate(1, 2) == 3"
    assert reward.check_golds([check, check, f"{check}\ncheck(join)"], ["join", None, None]) == [1]
    with pytest.raises(KeyError, match="tests"):
        reward([], [text], solution=["x"], name=["join"])


@needs_sandbox
def test_a_sandbox_that_breaks_down_ends_the_run(monkeypatch):
    reward = CodeReward(num_workers=1)
    monkeypatch.setattr(code_run, "python", lambda packages: (("/no/such/python",), ()))
    with pytest.raises(RewardInfrastructureError, match=r"fails the simplest programs \(no sandbox, no sandbox"):
        reward([], [fenced("x = 1")], solution=[ADD_CALL])
    with pytest.raises(ValueError, match="fails the simplest programs"):
        CodeReward()


@needs_sandbox
@pytest.mark.parametrize("tests", [ADD_CALL, ADD_ASSERT], ids=["call", "assert"])
@pytest.mark.parametrize("error", [None, BlockingIOError("no process")], ids=["no command", "no process"])
def test_a_sandbox_that_starts_at_the_second_attempt_is_no_fault_of_the_program(reward, tests, error, monkeypatch):
    reward.check_golds([tests])
    calls = []

    def start(command, *rest, begin=sandbox_run.start):
        calls.append(command)
        if len(calls) == 1 and error is not None:
            raise error
        return begin(["/no/such"] if len(calls) == 1 else command, *rest)

    for module in (sandbox_run, code_run):
        monkeypatch.setattr(module, "start", start)
    assert scores(reward, [("def add(a, b):\n    return a + b", tests)]) == [1.0]
    assert len(calls) > 2


def test_a_machine_without_isolation_is_refused(monkeypatch):
    monkeypatch.setattr(code_reward, "isolation", lambda: Isolation(["rlimits"]))
    with pytest.raises(ValueError, match=r"cannot shut in what a model writes.*allow_unsafe"):
        CodeReward()
    assert CodeReward(allow_unsafe=True).partial is False


@pytest.mark.parametrize("name", CASES["blocks"])
def test_where_the_program_is(name):
    text, found = CASES["blocks"][name]
    assert last_code(text) == found


SOLVED = "a, b = map(int, input().split())\nprint(a + b)"


@needs_sandbox
@pytest.mark.parametrize("text", [
    f"```python\n{SOLVED}\n```\nIts output:\n```\n3\n```\n",
    f"```\n{SOLVED}\n```\nIts output:\n```\n3\n```\nor\n```\nyes it is\n```\n",
    f"As follows:```python title=\"a.py\"\n{SOLVED}\n```\nIts output:\n```\n3\n```\n",
    f"1. So:\n   ~~~py\n   {SOLVED.replace(chr(10), chr(10) + '   ')}\n   ~~~\n",
    f"```python\n# ends in ```\n{SOLVED}\n```\n",
], ids=["output behind", "bare output behind", "text before", "indented", "fence in a comment"])  # fmt: skip
def test_the_program_is_found_among_other_blocks(reward, text):
    assert reward([], [text], solution=[ADD_IO]) == [1.0]


@needs_sandbox
def test_what_brings_the_parser_down_brings_down_nothing_else(reward):
    hostile = ["-" * 300_000 + "1", "(" * 300_000, "x = 1\0", "[" * 90 + "]" * 90 + "\n" * 100]
    texts = ["".join(f"```\n{block}\n```\n" for block in (block, block)) for block in hostile]
    assert reward([], texts, solution=[ADD_IO] * len(texts)) == [0.0] * len(texts)


ADD = "def add(a, b):\n    if b is None:\n        raise ValueError('no b')\n    return a + b"


@needs_sandbox
@pytest.mark.parametrize("form", CASES["forms"])
def test_forms_that_are_scored(reward, form):
    tests = CASES["forms"][form]
    method = (
        "class Solution:\n    def add(self, a, b):\n        return a + b\ndef add(a, b):\n    raise ValueError('no b')"
    )
    right = method if "Solution" in json.dumps(tests) else ADD
    assert scores(reward, [(right, tests), (right.replace("+", "-"), tests), ("x = 1", tests)]) == [1.0, 0.0, 0.0]


@needs_sandbox
def test_an_exception_arrives_as_the_kind_of_pythons_own_that_it_is(reward):
    raised = "import pytest\ndef test_f():\n    with pytest.raises(ValueError):\n        f('{')\n"
    caught = ["try:\n    f(0)\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert 0"]
    key = ["try:\n    f('k')\nexcept KeyError as error:\n    assert str(error) == \"'k'\"\nelse:\n    assert 0"]
    own = "class Bad(ValueError): pass\ndef f(x): raise Bad('no')"
    rows = [("import json\ndef f(x): return json.loads(x)", raised), (own, caught), ("def f(x): return {}[x]", key)]
    assert scores(reward, rows) == [1.0] * len(rows)


UNFIT = CASES["unfit"]


@needs_sandbox
@pytest.mark.parametrize("form", UNFIT)
def test_forms_that_cannot_be_scored(reward, form):
    program, tests = UNFIT[form]
    assert scores(reward, [(program, tests)]) == [None]


@needs_sandbox
@pytest.mark.parametrize("source", CASES["no escape"].values(), ids=CASES["no escape"])
def test_a_wrong_program_cannot_make_tests_unfit(reward, source):
    """None would spare it a bad score."""
    cells = ["assert len(add([1], [2])) == 2", "x = [1]\nassert add(x, [2]) == [1, 2]\nassert x == [1]",
             "assert add('a ', 'b').strip() == 'a b'", "assert add([2], [1]).sort() is None",
             "assert add(1, 2) != 4 and add(1, 2) == 3", "assert add(True, 0)"]  # fmt: skip
    assert scores(reward, [(source, [cell]) for cell in cells]) == [0.0] * len(cells)


@needs_sandbox
@pytest.mark.parametrize("partial", [False, True])
def test_no_program_is_its_own_judge(partial):
    reward = CodeReward(num_workers=2, timeout=1, partial=partial)
    rows = CASES["judged by itself"]
    got = scores(reward, rows.values())
    assert dict(zip(rows, got, strict=True)) == dict.fromkeys(rows)
    assert reward.check_golds([tests for _, tests in rows.values()]) == list(range(len(rows)))


HELPED = {
    "test": "def check(candidate):\n    assert abs(poly([2, 1], candidate([2, 1]))) < 1e-4\n",
    "entry_point": "zero",
}
POLY = "def poly(\n    xs,\n    x,\n):\n    return sum(a * math.pow(x, i) for i, a in enumerate(xs))\n"
ZERO = '\ndef zero(xs):\n    """A zero of a line.\n\n    >>> zero([2, 1])\n    -2.0\n    """\n'


@needs_sandbox
@pytest.mark.parametrize(
    "prompt", [POLY + ZERO, [{"role": "user", "content": f"Solve:\n```python\n{ZERO}{POLY}```\n"}]]
)
def test_helpers_are_those_of_the_prompt(reward, prompt):
    right, wrong = (f"def poly(*a):\n    return 0\ndef zero(xs):\n    return {x}" for x in ("-xs[0] / xs[1]", "1"))
    texts = [fenced(right), fenced(wrong), fenced("x = 1")]
    assert reward([prompt] * 3, texts, solution=[HELPED] * 3) == [1.0, 0.0, 0.0]
    unnamed = [HELPED["test"] + "check(zero)"] * 3
    assert reward([prompt] * 3, texts, solution=unnamed) == [1.0, 0.0, 0.0]
    assert reward.check_golds([HELPED, unnamed[0]], [prompt] * 2) == []
    assert reward.check_golds([HELPED, unnamed[0]]) == [0, 1]


@needs_sandbox
@pytest.mark.parametrize("end", ["pass", "...", "raise NotImplementedError", "'A polynomial.'"])
def test_a_function_that_a_prompt_only_begins_is_no_helper(reward, end):
    assert reward.check_golds([HELPED], [f"def poly(xs, x):\n    {end}\n{ZERO}"]) == [0]


@needs_sandbox
def test_a_name_that_a_test_could_have_is_a_function_too(reward):
    rows = [("def test_even(x): return x % 2 == 0", ["assert test_even(2)", "assert not test_even(3)"]),
            ("def test_even(x): return True", ["assert test_even(2)", "assert not test_even(3)"]),
            ("def comb(n, k): return 6", ["assert comb(4, 2) == 6"]),
            ("class Solution:\n    def gcd(self, a, b): return 3", ["assert gcd(12, 14) == 3"]),
            ("from math import gcd", ["assert gcd(12, 14) == 2"]),
            ("def len(x): return 6\ndef floor(x): return len(x)", ["assert floor(4) == 6"]),
            ("x = 1", ["assert gcd(12, 14) == 2"])]  # fmt: skip
    assert scores(reward, rows) == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]


@needs_sandbox
def test_what_cannot_be_scored_is_found_behind_tests_that_do_not_end():
    endless = ["while f(1) != 2:\n    pass"]
    cells = [["assert f(1) == 2"], endless, ["assert f(object())"], ["raise SystemExit"], ["import os\nos._exit(0)"],
             ["assert f(object())"], *[[f"assert f({i}) == 2"] for i in range(70)], ["assert f(object())"]]  # fmt: skip
    reward = CodeReward(num_workers=2, timeout=1)
    assert reward.check_golds(cells) == [2, 5, 76]


def test_everything_is_not_near_infinity():
    assert Approx(float("inf")) == float("inf")
    assert Approx(float("inf")) != 3.0
    assert _near(float("inf"), float("inf"), 1e-6)
    assert not _near(3.0, float("inf"), 1e-6)


AGGREGATES = ("np.mean(f(2)) == 4", "np.sum(f(2)) == 4", "np.shape(f(2)) == ()", "np.allclose(np.array(f(2)), 4)")


@needs_sandbox
def test_numpy_may_ask_a_result_for_anything_and_tests_may_not():
    reward = CodeReward(num_workers=1)
    rows = [[f"import numpy as np\nassert {each}"] for each in AGGREGATES]
    rows += [["assert f(2).name == 4"], ["import datetime\nassert f(2) == datetime.date(2020, 1, 1)"]]
    assert reward.check_golds(rows) == [4, 5]
    assert reward([], [fenced("def f(x): return 4")] * 6, solution=rows) == [1.0] * 4 + [None] * 2


@needs_sandbox
def test_numpy_is_there_and_no_other_package():
    reward = CodeReward(num_workers=1)
    asserts = ["assert mean([1, 2, 4]) == 7 / 3"]
    array = ["assert mean([1, 2, 4]) == [1, 2, 4]"]
    call = {"fn_name": "mean", "inputs": [[[1, 2, 4]]], "outputs": [7]}
    program = "import numpy as np\nprint(np.array(input().split(), dtype=int).sum())"
    rows = [
        (program, ADD_IO, 1.0),
        ("import numpy as np\ndef mean(x): return np.mean(x)", asserts, 1.0),
        ("import numpy as np\ndef mean(x): return np.array(x)", array, 1.0),
        ("import numpy as np\ndef mean(x): return np.sum(x)", call, 1.0),
        ("import numpy as np\ndef mean(x): return np.array(x, dtype=object) if x else object()", asserts, 0.0),
        ("import pytest\n" + program, ADD_IO, 0.0),
        ("import os, numpy\nos.listdir(os.path.dirname(os.path.dirname(numpy.__file__)))\nprint(3)", ADD_IO, 0.0),
    ]  # fmt: skip
    assert scores(reward, [row[:2] for row in rows]) == [row[2] for row in rows]


@needs_sandbox
def test_a_program_is_the_main_module(reward):
    source = (
        "import sys, dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    x: int\n"
        "def main():\n    print(pickle.loads(pickle.dumps(P(3))).x, len(sys.argv), sys.modules['__main__'].P is P)\n"
        "if __name__ == '__main__':\n    main()\n    sys.exit(0)"
    )
    assert scores(reward, [(source, {"inputs": [""], "outputs": ["3 1 True"]})]) == [1.0]


@needs_sandbox
def test_the_functions_of_a_program_are_those_of_a_module(reward):
    point = "from dataclasses import dataclass\nimport pickle\n@dataclass\nclass P:\n    x: int\n"
    value = f"{point}def add(a, b):\n    return P(a + b).x"
    copied = f"{point}def add(a, b):\n    return pickle.loads(pickle.dumps(P(a + b))).x"
    of_tests = "from dataclasses import dataclass\n@dataclass\nclass Q:\n    x: int\nassert add(1, Q(2).x) == 3"
    rows = [(value, ADD_CALL), (value, ADD_ASSERT), (copied, ADD_ASSERT), (value, [of_tests])]
    assert scores(reward, rows) == [1.0] * len(rows)


@needs_sandbox
def test_a_program_without_time_left_under_asserts_is_a_timeout(reward):
    # The signal that ends an endless loop, which on a busy machine the clock may end before.
    source = "import signal\ndef add(a, b): signal.raise_signal(signal.SIGXCPU)"
    logged = {}
    assert reward([], [fenced(source)], solution=[ADD_ASSERT], log_metric=logged.__setitem__) == [0.0]
    assert logged["reward/code/timeout"] == 1.0


@needs_sandbox
def test_each_assert_has_the_time_of_a_test_and_no_call_that_of_all():
    reward = CodeReward(num_workers=1, timeout=0.9)
    source = """
import resource, time
def f():
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    return resource.getrlimit(resource.RLIMIT_CPU)[0]
"""
    assert scores(reward, [(source, ["assert f() < 5"] * 32)]) == [1.0]


@needs_sandbox
def test_an_output_may_be_as_large_as_the_expected_one():
    reward = CodeReward(num_workers=1, timeout=5)
    lines = 2_200_000
    call = {"fn_name": "f", "inputs": [[lines]], "outputs": ["1\n" * lines]}
    rows = [(f"print('1\\n' * {lines})", {"inputs": [""], "outputs": ["1\n" * lines]}),
            ("def f(n): return '1\\n' * n", call)]  # fmt: skip
    assert scores(reward, rows) == [1.0, 1.0]


@needs_sandbox
def test_rollouts_of_a_problem_do_not_copy_its_tests(reward):
    cell = json.dumps({"inputs": ["1 " * 500_000], "outputs": ["1"]})
    tracemalloc.start()
    assert reward([], ["no code"] * 32, solution=[cell] * 32) == [0.0] * 32
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(cell)


SLEEPER = "import time\ntime.sleep(1000 + {})"


@needs_sandbox
def test_a_batch_has_a_budget_in_which_sleepers_take_no_time_of_others(caplog):
    reward = CodeReward(num_workers=2, timeout=2, batch_timeout=10.0)
    logged = {}
    texts = ["no code", *[fenced(SLEEPER.format(i)) for i in range(5)], fenced(SOLVED), fenced(SOLVED + "\n")]
    began = time.perf_counter()
    got = reward([], texts, solution=[{"inputs": ["1 2"], "outputs": ["3"]}] * 8, log_metric=logged.__setitem__)
    assert time.perf_counter() - began < 14
    assert got == [0.0, *[None] * 5, 1.0, 1.0]
    assert logged["reward/code/over_budget"] == logged["reward/code/unscored"] == 5 / 8
    assert logged["reward/code/timeout"] == 0.0
    assert "5 of 8 rollouts were not done in batch_timeout (10 s)" in caplog.text
    with pytest.raises(ValueError, match="batch_timeout"):
        CodeReward(batch_timeout=0)


@needs_sandbox
def test_time_that_others_leave_is_for_those_that_need_it():
    reward = CodeReward(num_workers=1, timeout=1, batch_timeout=12.0)
    slow = "import time\ntime.sleep(2.5)\n" + SOLVED
    texts = [fenced(slow), *[fenced(SOLVED + "\n" * i) for i in range(5)]]
    # An equal share of three quarters of the time is 1.5 s.
    assert reward([], texts, solution=[{"inputs": ["1 2"], "outputs": ["3"]}] * 6) == [1.0] * 6


def test_forms_of_tests():
    stdin = [Case("stdin", "1", "2"), Case("stdin", "3", "4")]
    assert parse_tests({"inputs": ["1", "3"], "outputs": ["2", "4"]}) == stdin
    assert parse_tests([{"input": "1", "output": "2"}, {"input": "3", "output": "4", "type": "stdin"}]) == stdin
    assert parse_tests({"language": "python", "test_cases": [{"input": "1", "output": "2", "type": "stdin_stdout"},
                                                            {"input": "3", "output": "4"}]}) == stdin  # fmt: skip
    assert parse_tests([{"input": "1\n[2]", "output": "3"}], "f") == [Case("call", [1, [2]], 3, "f")]
    assert parse_tests({"asserts": ["assert f()"], "setup": "import math"}) == [
        Case("assert", "import math\nassert f()")
    ]
    assert parse_tests({"functional": "check(Solution().f)"}) == [Case("assert", "check(Solution().f)")]
    assert parse_tests("def test_f():\n    assert f()") == [Case("assert", "def test_f():\n    assert f()")]
    both = [Case("assert", "import math\nassert f(1)"), Case("assert", "import math\nassert f(2) == {\n 1}")]
    assert parse_tests("import math\nassert f(1)\nassert f(2) == {\n 1}\n") == both
    between = "a = f(1)\nassert a\na = f(2)\nassert a"
    assert parse_tests(between) == [Case("assert", f"\n{between}")]
    assert parse_tests("f(1) is 2") == parse_tests("x = 1") == []
    called = [Case("call", [1], 2, "f")]
    wrapped = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [["5"], [[6]]]}
    assert parse_tests(wrapped) == [Case("call", [1], "5", "f"), Case("call", [2], [6], "f")]
    assert [case.expected for case in parse_tests({**wrapped, "outputs": [[5], [6, 7]]})] == [[5], [6, 7]]
    assert parse_tests([{"fn_name": "f", "input": "1", "output": "[5]"}]) == [Case("call", [1], [5], "f")]
    # A text is JSON only where the input is one, too.
    texts = {"fn_name": "s", "inputs": [["1", "2"]], "outputs": ["3"]}
    assert parse_tests(texts) == [Case("call", ["1", "2"], "3", "s")]
    functional = [{"input": "1", "output": "2", "testtype": "functional"}]
    assert parse_tests([{**functional[0], "metadata": {"func_name": "f"}}]) == called
    assert parse_tests(functional, '{"func_name": "f"}') == called
    assert parse_tests(functional) == []
    for bad in ("", "[]", "{}", "not json", [1], {"inputs": ["1"], "outputs": []}, None, 3, "[" * 100_000):
        assert parse_tests(bad) == []


def test_chosen_tests_are_spread_and_have_the_last():
    cases = [Case("stdin", str(i), "") for i in range(100)]
    chosen = [int(case.given) for case in choose_cases(cases, 8)]
    assert len(set(chosen)) == 8
    assert chosen[-1] == 99
    assert chosen[0] > 0
    assert choose_cases(cases, 100) == cases


def test_sameness_of_outputs():
    assert same_output("1  2\n\n3 ", "1 2\n3\n", 0)
    same = [("0.3333334", "0.3333333"), ("0.0000001", "0.0"), ("1000000.5", "1000000.0"), ("0.000012", "0.0000123"),
            ("0", "0.00000000000000006"), ("0.00000041", "0.0000004")]  # fmt: skip
    other = [("0.001", "0.0"), ("1000002.5", "1000000.0"), ("0", "0.0000004"), ("0.0000008", "0.0000004")]
    assert [same_output(got, expected, 1e-6) for got, expected in (*same, *other)] == [True] * 6 + [False] * 4
    assert not any(same_output(got, expected, 2) for got, expected in (("1 2", "1 2 3"), ("4", "3"), ("nan", "0.5")))


SAME = [(3, 3), (3.0, 3), (0.1 + 0.2, 0.3), ((1, [2]), [1, [2]]), ({1: "a"}, {"1": "a"}), (None, None),
        (10**5000, 10**5000)]  # fmt: skip
DIFFERENT = [(3, 4), (True, 1), (1, True), ({1: "a"}, {"1": "b"}), ({1: "a"}, {"2": "a"}), ({1, 2}, [1, 2]), ("3", 3),
             ({1: "a", "1": "a"}, {"1": "a", "2": "a"}), ({1: "a"}, {"1": "a", "2": "a"}), (float("nan"), 1.0),
             (10**400, 1.5), (10**5000, 10**5000 + 1), (3, [3]), ([3], 3), (0.0, 4e-7), (3.0000001, 3)]  # fmt: skip


def test_sameness_of_values():
    assert [pair for pair in SAME if not same_value(encode(pair[0]), pair[1], 1e-6)] == []
    assert [pair for pair in DIFFERENT if same_value(encode(pair[0]), pair[1], 1e-6)] == []


@pytest.mark.parametrize("rubbish", [3, {}, {"int": 3}, {"list": 3}, {"dict": [[1]]}, {"dict": 1}, {"x": 1}, [[]]])
def test_rubbish_is_no_value(rubbish):
    for expected in (3, 2.5, "x", None, [1], {"a": 1}):
        assert not same_value(rubbish, expected, 1e-6)
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode(rubbish)


def test_plain_data_arrive_as_they_were():
    value = {"a": [1, -(2**70), 0.5, None, True], (1, 2): {3, "x"}, 1: b"\x00", 2: 1 + 2j, 3: frozenset([()])}
    assert decode(json.loads(json.dumps(encode(value)))) == value
    with pytest.raises(Unsupported, match="not plain data"):
        encode([object()])
