"""The study of streams: what its calculator's time is, what its measurement means, what its table says."""

import json

import pytest
import torch

from examples.tools.warm_start import encode
from studies.clock import streams, streams_run, tooled
from studies.clock.tasks import task_of
from tests.support.tiny import tiny_model
from tests.support.tooled import tokenizer


def test_the_warm_start_has_seen_none_of_the_problems_and_calls_for_what_is_asked():
    found = tooled.solutions(1_000)
    questions = {each["prompt"][0]["content"] for each in found}
    assert not questions & {row["prompt"] for row in tooled.rows()}
    golds = {row["prompt"]: row["solution"] for row in tooled.rows(1_000, 3)}
    kinds = {row["prompt"]: row["kind"] for row in tooled.rows(1_000, 3)}
    called = {turn["prompt"][0]["content"]: turn["prompt"][2]["content"] for turn in found if len(turn["prompt"]) > 1}
    for kind, share in tooled.CALLED.items():
        asked = [question for question in questions if kinds[question] == kind]
        assert sum(question in called for question in asked) / len(asked) == pytest.approx(share, abs=0.1)
        told = [called[question] == golds[question] for question in asked if question in called]
        assert all(told) if kind != "out of reach" else not any(told)


def test_problems_that_are_held_out_are_not_trained_on():
    task = tooled.tooled(60)
    held_out = {row["prompt"][0]["content"] for row in task.held_out}
    trained = {row[0]["content"] for row in task.train["prompt"]}
    assert (len(held_out), len(trained)) == (60, 400)
    assert not held_out & trained


def test_the_accuracy_is_the_probability_of_the_two_ways_to_the_gold():
    tok = tokenizer()
    model = tiny_model(tok)
    rows = [
        {"prompt": "What is 12 * 3?", "solution": "36", "kind": "learnable"},
        {"prompt": "What is 101 * 3?", "solution": "303", "kind": "out of reach"},
        {"prompt": "What is 4 + 5?", "solution": "9", "kind": "easy"},
    ]
    task = task_of(rows, 3, tooled.last_number, 48)
    # Until probabilities of whole calls are not all but 0.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    answer = {"role": "assistant", "content": "36"}
    for step in range(120):
        messages = [*task.held_out[0]["prompt"], *(tooled.call(rows[0]) if step % 2 else []), answer]
        ids, labels = encode(tok, messages)
        model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()

    @torch.no_grad()
    def probability(messages, reply):
        before = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        whole = tok.apply_chat_template([*messages, reply], tokenize=False).removesuffix("\n")
        prefix, reply_ids = tok(before)["input_ids"], tok(whole.removeprefix(before))["input_ids"]
        logits = model(torch.tensor([prefix + reply_ids])).logits[0].log_softmax(-1)
        chosen = [logits[len(prefix) + i - 1, token] for i, token in enumerate(reply_ids)]
        return float(torch.stack(chosen).sum().exp())

    expected = {}
    for row in rows:
        question = {"role": "user", "content": row["prompt"]}
        answer = {"role": "assistant", "content": row["solution"]}
        asked, told = tooled.call(row)
        expected[row["kind"]] = probability([question], answer)
        if row["kind"] != "out of reach":
            by_call = probability([question], asked) * probability([question, asked, told], answer)
            assert row["kind"] == "easy" or by_call > 0.01
            expected[row["kind"]] += by_call
    found = streams_run.accuracy(model, tok, task)
    for kind, value in expected.items():
        assert found[kind] == pytest.approx(value, rel=1e-3), kind
    assert found["all"] == pytest.approx(sum(expected.values()) / 3, rel=1e-3)


def stored_run(folder, row, seed, seconds, accuracy, part="tools"):
    steps = len(accuracy) - 1
    name = f"{part}-{row.replace(', ', '-')}-seed{seed}.json"
    run = {
        "settings": {"settings": {"seed": seed}},
        "machine": {},
        "wall": [5.0 + seconds * i for i in range(steps)],
        "points": [{"step": i, "all": each} for i, each in enumerate(accuracy)] if part == "tools" else [],
        "logs": {name: [] for name in streams_run.LOGS},
    }
    run["logs"]["rollout/waited"] = [9.0] + [2.0] * (steps - 1)
    (folder / name).write_text(json.dumps(run))


def test_the_table_has_seconds_without_the_first_step_and_minutes_to_the_level(tmp_path):
    stored_run(tmp_path, "sync, groups", 0, 30.0, [0.2, 0.4, 0.6, 0.7])
    stored_run(tmp_path, "sync, groups", 1, 20.0, [0.2, 0.4, 0.5, 0.6])
    stored_run(tmp_path, "stream, none", 0, 6.0, [0.7, 0.4, 0.6, 0.7])
    stored_run(tmp_path, "stream", 0, 8.0, [0.2] * 5, part="lengths")
    words = ["--report", "--output", str(tmp_path), "--results", str(tmp_path), "--level", "0.6"]
    lines = {(line["part"], line["row"], line["seed"]): line for line in streams.main(words)}
    assert len(lines) == 4
    first = lines["tools", "sync, groups", 0]
    assert first["seconds a step"] == 30.0
    assert first["minutes"] == pytest.approx(35.0 / 60)
    assert first["rollout/waited"] == 2.0
    assert lines["tools", "sync, groups", 1]["minutes"] == pytest.approx(45.0 / 60)
    assert lines["tools", "stream, none", 0]["minutes"] == 0.0
    assert lines["lengths", "stream", 0]["minutes"] is None
    assert (tmp_path / "streams.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "streams.json").read_text())["level"] == 0.6
