"""Programs that mean harm: none reaches the trainer or what is beside it, and the model is told what went wrong."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from basis_rl import sandbox
from basis_rl.tools import PythonTool, ToolBroken
from basis_rl.tools.python import fair_share, shortened
from tests.support.processes import descendants, wait_until

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

given = sandbox.isolation()
pytestmark = pytest.mark.skipif(not given.complete, reason=f"this machine gives {given}")
SECRET = "hf_secretsecretsecret"


@pytest.fixture(scope="module")
def tool():
    """With time that nothing honest needs, however busy the machine is."""
    return PythonTool(timeout=30.0, memory_mb=512, processes=16, num_workers=4)


@pytest.fixture(scope="module")
def strict():
    return PythonTool(timeout=0.5, memory_mb=512, processes=16, num_workers=4)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path_factory, monkeypatch):
    """Neither processes nor folders."""
    place, before = tmp_path_factory.mktemp("programs"), set(descendants(os.getpid()))
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield

    def left():
        return set(descendants(os.getpid())) - before, set(place.iterdir())

    wait_until(lambda: not any(left()))


@pytest.mark.parametrize(("code", "shown"), CASES["programs"])
def test_programs(code, shown, tool):
    result = tool.run(code)
    assert (result.text, result.failed) == (shown, False)
    assert tool(code) == shown


@pytest.mark.parametrize(("code", "part"), CASES["errors"])
def test_errors_are_shown(code, part, tool):
    result = tool.run(code)
    assert result.failed
    assert part in result.text
    assert len(result.text) < tool.max_chars + 200


def test_nothing_is_kept_between_calls(tool):
    assert tool("x = 1\nopen('kept', 'w').close()\nx") == "1"
    assert "NameError" in tool("x")
    assert "kept" not in tool("import os\nos.listdir()")


# Far more than is allowed, and bounded all the same: where the limit should ever fail, the machine must survive.
BOMBS = CASES["bombs"]


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_errors(name, strict):
    start = time.monotonic()
    result = strict.run(BOMBS[name])
    assert result.failed, result
    assert "rror" in result.text or "killed" in result.text, result.text
    assert len(result.text) < strict.max_chars + 200
    assert time.monotonic() - start < 20


def test_a_gigabyte_of_output_costs_no_memory(tool):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = tool.run(BOMBS["output"])
    assert result.failed
    assert "more than 4 MB" in result.text
    assert "left out" in result.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # kB


def test_network_secrets_and_other_files_are_out_of_reach(tool, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    secret = tmp_path / "token"
    secret.write_text(SECRET)
    read = "import os\np = {!r}\nprint(os.listdir(p) if os.path.isdir(p) else open(p).read())"
    places = (secret, Path.home(), Path(__file__), "/etc/shadow", f"/proc/{os.getpid()}/environ")
    codes = [read.format(str(place)) for place in places]
    written = (tmp_path / "new", secret, "/tmp/new-of-a-program", Path(sys.prefix) / "new")
    codes += [f"open({str(place)!r}, 'w').write('harm')" for place in written]
    codes.append(f"import os\nos.remove({str(secret)!r})")
    codes.append(f"import os\nos.symlink({str(secret)!r}, 'a')\nopen('a').read()")
    with socket.create_server(("127.0.0.1", 0)) as server:
        codes.append(f"import socket\nsocket.create_connection({server.getsockname()!r}, 2)")
        results = [answer.result() for answer in [tool.start(code=code) for code in codes]]
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    for code, result in zip(codes, results, strict=True):
        assert result.failed, code
        assert SECRET not in result.text
    assert secret.read_text() == SECRET
    assert not any(Path(place).exists() for place in written if place != secret)
    seen = tool("import os\nfor k, v in os.environ.items(): print(k, v)")
    assert "HOME" in seen
    assert "HF_TOKEN" not in seen


def test_many_at_a_time(strict):
    waits = PythonTool(timeout=60.0, num_workers=8)
    start = time.monotonic()
    answers = [waits.start(code=f"import time\ntime.sleep(2)\n{i}") for i in range(8)]
    assert [answer.result().text for answer in answers] == [str(i) for i in range(8)]
    assert time.monotonic() - start < 8 * 2  # what one after the other would only sleep
    bombs = [strict.start(code=BOMBS[name]) for name in ("fork bomb", "output")]
    assert waits("3") == "3"  # beside them
    assert all(answer.result().failed for answer in bombs)


def test_a_trainer_that_ends_does_not_wait_for_programs():
    script = (
        "from basis_rl.tools import PythonTool\nt = PythonTool(timeout=600, num_workers=2)\n"
        "for _ in range(8): t.start(code='import time; time.sleep(600)')\nimport time; time.sleep(0.5); print('end')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_threads_end_with_their_tool_and_an_error_reaches_who_waits(monkeypatch):
    before = set(threading.enumerate())
    mine = PythonTool(num_workers=3)
    started = set(threading.enumerate()) - before
    assert len(started) >= 3
    assert all(thread.daemon for thread in started)
    assert mine.start("1 + 1").result(60).text == "2"
    monkeypatch.setattr(PythonTool, "_answer", lambda self, finished: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mine.start("1").result(60)
    del mine
    wait_until(lambda: not any(thread.is_alive() for thread in started))


def test_a_call_that_is_no_text_is_the_models_error(tool):
    for code in (None, 3, ["print(1)"]):
        with pytest.raises(TypeError, match="code must be text"):
            tool.start(code=code)
    assert "300000 characters; at most 200000 are allowed" in tool.run("x" * 300_000).text
    assert "most" not in tool.run("#" * 200_000).text


def test_without_isolation_it_is_refused_unless_one_insists(monkeypatch):
    none = sandbox.Isolation(["rlimits"])
    for module in ("basis_rl.tools.python", "basis_rl.sandbox.policy"):
        monkeypatch.setattr(f"{module}.isolation", lambda: none)
    with pytest.raises(ValueError, match="require_isolation") as refused:
        PythonTool()
    assert "no network" in str(refused.value)
    assert PythonTool(require_isolation=False)("1 + 1") == "2"


def test_a_sandbox_that_starts_at_the_third_attempt_is_an_answer_and_one_that_never_does_is_none(tool, monkeypatch):
    attempt, said = tool._attempt, [OSError("no memory")] * 2

    def fails(code):
        if said:
            raise said.pop()
        return attempt(code)

    monkeypatch.setattr("basis_rl.tools.python.time.sleep", lambda seconds: None)
    monkeypatch.setattr(tool, "_attempt", fails)
    assert tool("6 * 7") == "42"
    said += [OSError("no memory")] * 3
    with pytest.raises(ToolBroken, match="no memory"):
        tool.run("1")
    monkeypatch.setattr("basis_rl.tools.python._RUNNER", "import sys; sys.exit('no such thing')")
    with pytest.raises(ToolBroken, match="no such thing"):
        tool.run("1")


def test_the_cores_are_shared_among_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    for ranks, workers in (("1", 12), ("4", 3), ("12", 2)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert fair_share() == workers


def test_shortened_keeps_both_ends():
    assert shortened("abc", 3) == "abc"
    text = "".join(map(str, range(1000)))
    short = shortened(text, 100)
    assert short.startswith(text[:50])
    assert short.endswith(text[-50:])
    assert f"{len(text) - 100} characters left out" in short
