"""Rollouts as they are shown: those that were asked for, and harmless whatever they say."""

import json
import random
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from html import unescape

import pytest

from basis_rl.cli.main import main
from basis_rl.report import page as report
from basis_rl.report.compare import compare_runs
from basis_rl.report.rollouts import ask_math_verify, choose, page, text
from basis_rl.run.rollouts import KeptRollouts
from tests.report.folders import Elements, write_run
from tests.run.test_keeping import row

HOSTILE = (
    "\x1b[2J\x1b]0;title\x07\r\x9b31m\u202egnp\ud800\u2028</pre><script>alert(1)</script><img src=x onerror=alert(1)>"
)


@pytest.fixture
def run(tmp_path):
    kept = KeptRollouts(tmp_path / "run", 1)
    write_run(tmp_path / "run")
    for step in (1, 2, 3):
        kept.add(
            row(prompt_id=f"id{i}", prompt=f"Problem {i}", completion=f"said {step}.{i}",
                reward=[0.0, 1.0, None, 0.5][i],
                advantage=[0.1, -0.9, 0.0, 0.5][i], tokens=step * 10 + i, extra={"verdict": "no box"})
            for i in range(4)
        )  # fmt: skip
        kept.write(step)
    return tmp_path / "run"


def chosen(*args, **given):
    return [each["completion"].removeprefix("said ") for each in choose(*args, **given)]


def test_steps_rewards_prompts_and_order(run):
    assert chosen(run) == ["3.0", "3.1", "3.2", "3.3"]
    assert chosen(run, "2") == ["2.0", "2.1", "2.2", "2.3"]
    assert chosen(run, "1-2", limit=5) == ["2.0", "2.1", "2.2", "2.3", "1.0"]
    assert chosen(run, "all", prompt="PROBLEM 3") == chosen(run, "all", prompt="id3") == ["3.3", "2.3", "1.3"]
    assert chosen(run, below=0.5) == ["3.0", "3.3"]
    assert chosen(run, above=0.5) == ["3.1", "3.3"]
    assert chosen(run, sort="reward") == ["3.1", "3.3", "3.0", "3.2"]
    assert chosen(run, sort="advantage", limit=2) == ["3.1", "3.3"]
    assert chosen(run, "all", sort="length", limit=2) == ["3.3", "3.2"]


def test_the_command_shows_them(run, tmp_path, capsys):
    assert main(["rollouts", str(run), "--reward_above", "1"]) == 0
    said = capsys.readouterr().out
    assert "said 3.1" in said
    assert "said 3.0" not in said
    for known in ("reward 1", "advantage -0.9", "baseline 0.5", "31 tokens", "verdict: no box"):
        assert known in said
    assert max(map(len, said.splitlines())) <= 80
    assert main(["rollouts", str(run), "--page", str(tmp_path / "p.html")]) == 0
    assert (tmp_path / "p.html").read_text().count("<article") == 12


def test_what_is_not_there_is_said(run, tmp_path, capsys):
    for words, told in (
        ([str(tmp_path / "other")], "keep_rollouts_mb"),
        ([str(run), "--step", "7"], "from 1 to 3"),
        ([str(run), "--step", "first"], "N-M"),
        ([str(run), "--limit", "0"], "--limit"),
    ):
        assert main(["rollouts", *words]) == 2
        assert told in capsys.readouterr().err
    assert main(["rollouts", str(run), "--prompt", "nowhere"]) == 0
    assert "No rollout" in capsys.readouterr().out


def judged():
    """Rollouts with verdicts, of which some are alike but for a capital, and some have none."""
    rng = random.Random(0)
    said = ["right", "Right", "unequal", "unsound: chain", "unsound: near", "refused: <b>", None]
    return [
        row(completion=f"said {i}", gold=f"g{rng.randrange(4)}<i>", prompt=f"Problem {i}",
            extra={"answer": f"{rng.choice('aA')}&", "verdict": rng.choice(said)})
        for i in range(80)
    ]  # fmt: skip


ORDER = """
const articles = ROWS.map(dataset => ({dataset, querySelector: () => ({textContent: ""})}));
let shown = articles.map(a => a.dataset.at);
const listeners = {}, boxes = {};
const box = id => boxes[id] ??= {
  value: "", append: (...all) => { shown = all.map(a => a.dataset.at); },
  addEventListener: (kind, act) => { listeners[id + kind] = act; },
};
globalThis.document = {
  getElementById: box, querySelectorAll: () => articles, querySelector: () => box("form"),
};
SCRIPT
const found = [];
for (const order of ["advantage", ""]) { box("order").value = order; listeners.orderchange(); found.push(shown); }
console.log(JSON.stringify(found));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which runs the page's script")
def test_the_page_puts_the_largest_advantages_first_and_back():
    rows = [{"step": 1, **row(advantage=value)} for value in (0.1, -2.0, None, 0.5, 0.5)]
    html = page(rows, "t")
    data = [each for tag, each in Elements(html).found if tag == "article"]
    given = [{"at": at, "advantage": each["data-advantage"]} for at, each in enumerate(data)]
    (script,) = re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL)
    code = ORDER.replace("SCRIPT", script.replace("const box", "const own")).replace("ROWS", json.dumps(given))
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[1, 3, 4, 0, 2], [0, 1, 2, 3, 4]]


def test_the_gold_stands_beside_every_answer():
    rows = [{"step": 1, **each} for each in judged()]
    html = page(rows, "t")
    pairs = re.findall(r'class="pair"><span>Answer <code>(.*?)</code></span><span>Gold <code>(.*?)</code>', html)
    assert [tuple(map(unescape, pair)) for pair in pairs] == [(each["extra"]["answer"], each["gold"]) for each in rows]
    assert 'class="pair"' not in page([{"step": 1, **row(gold=None)}], "t"), "nothing is known"


def test_counts_and_examples_of_the_summary_are_those_of_the_rollouts():
    rows = [{"step": 1, **each} for each in judged()]
    counts = Counter(each["extra"]["verdict"] for each in rows)
    assert counts.pop(None)
    html = page(rows, "t")
    told = {}
    verdict = None
    row_of_table = (
        r'<tr>(?:<td class="number".*?>(\d+)</td><td.*?>(.*?)</td>)?' + 2 * "<td><code>(.*?)</code></td>" + "</tr>"
    )
    examples = defaultdict(list)
    for count, name, *pair in re.findall(row_of_table, html):
        if count:
            verdict = unescape(name)
            told[verdict] = int(count)
        examples[verdict].append(tuple(map(unescape, pair)))
    assert told == counts
    shown = Counter(attributes["data-verdict"] for tag, attributes in Elements(html).found if tag == "article")
    assert shown == {**counts, "": len(rows) - counts.total()}
    datalist = html.partition("<datalist")[2].partition("</datalist>")[0]
    offered = [attributes["value"] for tag, attributes in Elements(datalist).found if tag == "option"]
    assert sorted(offered) == sorted(counts)
    for verdict, shown_pairs in examples.items():
        pairs = {(each["gold"], each["extra"]["answer"]) for each in rows if each["extra"]["verdict"] == verdict}
        assert len(shown_pairs) == len(set(shown_pairs)) == min(3, len(pairs))
        assert set(shown_pairs) <= pairs
    assert "<table" not in page([{"step": 1, **row()}], "t")


def test_a_verdict_is_asked_for_by_a_part_of_it(tmp_path, capsys):
    kept = KeptRollouts(tmp_path, 1)
    kept.add(judged())
    kept.write(1)
    counts = Counter(each["extra"]["verdict"] for each in judged())
    for part in ("unsound", "unsound: near", "unequal"):
        wanted = {verdict: count for verdict, count in counts.items() if verdict and verdict.startswith(part)}
        assert main(["rollouts", str(tmp_path), "--verdict", part, "--limit", "80"]) == 0
        said = capsys.readouterr().out
        assert said.count("--- step") == sum(wanted.values())
        (line,) = re.findall(r"^Verdicts: (.*)$", said, re.MULTILINE)
        assert dict(reversed(each.split(" ", 1)) for each in line.split(", ")) == {k: str(n) for k, n in wanted.items()}


def test_math_verify_alone_is_asked_about_what_the_rules_have_rejected():
    rows = [
        row(gold=gold, extra={"answer": answer, "verdict": verdict})
        for gold, answer, verdict in (
            ("0", r"\text{I give up, } 0", "refused: beside"),
            ("5", "6", "unequal"),
            ("5", "5", "right"),
            ("8", "x = 7 = 8", "unsound: chain"),
            ("8", "8", None),
            ("8", "8", "my own"),
        )
    ]
    before = [each["extra"]["verdict"] for each in rows]
    ask_math_verify(rows)
    after = [each["extra"]["verdict"] for each in rows]
    equal = " (equal to Math-Verify alone)"
    assert after == [before[0] + equal, *before[1:3], before[3] + equal, *before[4:]]


def hostile():
    return [{"step": 1, **row(prompt_id=HOSTILE, prompt=HOSTILE, completion=HOSTILE + "x" * 5000, rendered=HOSTILE,
                              rewards={HOSTILE: 1.0, "b": None}, gold=HOSTILE,
                              extra={HOSTILE: HOSTILE, "verdict": HOSTILE, "answer": HOSTILE})}]  # fmt: skip


def test_a_terminal_gets_letters_only():
    shown = text(hostile())
    assert shown.replace("\n", "").isprintable()
    assert max(map(len, shown.splitlines())) <= 80


def test_a_page_runs_nothing_but_its_own_script(tmp_path):
    html = page(hostile(), HOSTILE)
    html.encode()
    tags = Elements(html).found
    scripts = [attributes for tag, attributes in tags if tag == "script"]
    (policy,) = [found["content"] for tag, found in tags if tag == "meta" and "http-equiv" in found]
    assert [f"script-src 'nonce-{found['nonce']}'" in policy for found in scripts] == [True]
    assert "default-src 'none'" in policy
    assert {tag for tag, _ in tags}.isdisjoint({"img", "link", "iframe"})
    assert not any(name.startswith("on") or name in ("src", "href") for _, found in tags for name in found)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", html)


def test_a_comparison_shows_the_three_that_weigh_most(run, monkeypatch):
    monkeypatch.setattr(report, "svg", lambda *args: "")
    html = report.html(compare_runs([run]))
    places = [html.index(f"said 3.{i}") for i in (1, 3, 0)]
    assert places == sorted(places)
    assert "said 3.2" not in html
    assert "basis-rl rollouts run" in html
    kept = KeptRollouts(run, 1)
    kept.add([row(completion=HOSTILE, tokens=10**400, advantage=10**400, rewards={"a": 10**400})])
    kept.write(4)
    tags = {tag for tag, _ in Elements(report.html(compare_runs([run]))).found}
    assert tags.isdisjoint({"script", "img"})
