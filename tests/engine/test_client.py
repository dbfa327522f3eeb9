"""Sampling over HTTP: what is asked, in which order it comes back, and what servers do that die, hang or refuse.

Here they are fake ones; the real one is in test_vllm.py.
"""

import dataclasses
import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from basis_rl.engine import Completion, Sampling, ServersLost, client, sample_servers
from basis_rl.engine.client import request_seed
from basis_rl.engine.probe import ServerFacts, ask_server
from tests.support.fake_vllm import FakeServer, completion
from tests.support.tiny import tiny_tokenizer

TOKENS = [[3 + i, 7, i] for i in range(40)]
SAMPLING = Sampling(max_new_tokens=8)
TOKENIZER = tiny_tokenizer()


def expected(n=3, seed=0, tokens=TOKENS):
    return {
        i: [
            Completion(
                TOKENIZER.decode(c["token_ids"], skip_special_tokens=True),
                c["token_ids"],
                c["finish_reason"] == "length",
            )
            for c in (completion(prompt, request_seed(seed, i) + k, SAMPLING.max_new_tokens) for k in range(n))
        ]
        for i, prompt in enumerate(tokens)
    }


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(client, "_LONGEST_PAUSE", 0.1)


def test_each_prompt_is_one_request_with_every_setting_stated():
    settings = Sampling(8, 0.7, 0.9, 20, 0.01, 1.1, {"min_tokens": 2})
    with FakeServer() as fake:
        found = dict(sample_servers([fake.url], TOKENIZER, TOKENS, settings, num_samples=3, stop_token_ids=[5]))
    assert found == expected()
    assert sorted(body["prompt"] for body in fake.requests) == sorted(TOKENS)
    stated = {k: v for k, v in fake.requests[0].items() if k not in ("prompt", "seed")}
    names = {"max_new_tokens": "max_tokens"}
    given = {names.get(k, k): v for k, v in dataclasses.asdict(settings).items() if k != "generation_kwargs"}
    assert given.items() <= stated.items()
    assert stated["n"] == 3
    assert stated["stop_token_ids"] == [5]
    assert stated["min_tokens"] == 2
    assert stated["presence_penalty"] == stated["frequency_penalty"] == 0.0


def test_requests_are_in_flight_together_and_no_more_than_asked_for():
    # The first four at each server wait for one another, and then a moment for a fifth.
    together = threading.Barrier(8, action=lambda: time.sleep(0.2))

    def before(number, body):
        if number <= 4:
            together.wait(60)

    with FakeServer() as one, FakeServer() as other:
        one.before = other.before = before
        found = dict(sample_servers([one.url, other.url], TOKENIZER, TOKENS, SAMPLING, num_samples=3, concurrency=4))
    assert found == expected()
    assert one.most == other.most == 4
    assert len(one.requests) + len(other.requests) == len(TOKENS)


def test_a_faster_server_does_more():
    """One server is as slow as can be: it answers its first two requests when the other one has all that are left."""
    all_at_work, all_taken = threading.Barrier(4), threading.Event()

    def at_fast(number, body):
        if number <= 2:
            all_at_work.wait(60)
        if number == len(TOKENS) - 2:
            all_taken.set()

    def at_slow(number, body):
        if number <= 2:
            all_at_work.wait(60)
            all_taken.wait(60)

    with FakeServer() as fast, FakeServer() as slow:
        fast.before, slow.before = at_fast, at_slow
        dict(sample_servers([fast.url, slow.url], TOKENIZER, TOKENS, SAMPLING, concurrency=2))
    assert (len(fast.requests), len(slow.requests)) == (len(TOKENS) - 2, 2)


def test_greedy_is_asked_for_once_and_copied():
    with FakeServer() as fake:
        found = dict(sample_servers([fake.url], TOKENIZER, TOKENS[:2], Sampling(8, temperature=0.0), num_samples=3))
    assert [body["n"] for body in fake.requests] == [1, 1]
    assert all(completions[0] == completions[1] == completions[2] for completions in found.values())


def test_seeds_are_those_of_the_caller_or_apart():
    with FakeServer() as fake:
        dict(sample_servers([fake.url], TOKENIZER, TOKENS, SAMPLING, num_samples=64))
        starts = sorted(body["seed"] for body in fake.requests)
        assert all(later - earlier >= 64 for earlier, later in itertools.pairwise(starts))
        assert starts[-1] < 2**53, "a number of JSON"
        fake.requests.clear()
        dict(sample_servers([fake.url], TOKENIZER, TOKENS[:3], SAMPLING, seeds=[7, 5, 9]))
        assert {tuple(body["prompt"]): body["seed"] for body in fake.requests} == {
            tuple(prompt): seed for prompt, seed in zip(TOKENS, [7, 5, 9], strict=False)
        }


@pytest.mark.parametrize("status", [500, 429, 408])
def test_what_fails_is_asked_again(status, quick):
    with FakeServer() as fake:
        fake.before = lambda number, body: status if number % 3 == 0 else None
        assert dict(sample_servers([fake.url], TOKENIZER, TOKENS, SAMPLING, num_samples=3, concurrency=4)) == expected()
    assert len(fake.requests) > len(TOKENS)


def test_a_server_that_dies_leaves_its_work_to_the_others(quick):
    with FakeServer(seconds=0.02) as stays, FakeServer(seconds=0.02) as dies:

        def before(number, body):
            if number == 5:
                threading.Thread(target=dies.stop).start()
            return 500 if number >= 5 else None

        dies.before = before
        urls = [dies.url, stays.url]
        assert (
            dict(sample_servers(urls, TOKENIZER, TOKENS, SAMPLING, num_samples=3, concurrency=4, patience=0.3))
            == expected()
        )


def test_one_that_is_away_at_the_start_does_not_keep_the_others_from_it(quick):
    with FakeServer() as stays:
        found = dict(
            sample_servers(["http://127.0.0.1:9", stays.url], TOKENIZER, TOKENS, SAMPLING, num_samples=3, patience=0.5)
        )
    assert found == expected()


def test_one_that_is_sick_does_not_take_the_others_down(quick):
    with FakeServer(seconds=0.05) as stays, FakeServer() as sick:
        sick.before = lambda number, body: 500
        found = dict(sample_servers([sick.url, stays.url], TOKENIZER, TOKENS, SAMPLING, num_samples=3, concurrency=8))
    assert found == expected()


def test_a_prompt_that_fails_at_one_server_again_and_again_waits_for_the_other(quick):
    often = threading.Event()

    def at_sick(number, body):
        if number >= 6:  # more than are allowed where there is no other server
            often.set()
        return 500

    with FakeServer() as busy, FakeServer() as sick:
        busy.before, sick.before = lambda number, body: None if often.wait(60) else 500, at_sick
        urls = [busy.url, sick.url]
        found = dict(sample_servers(urls, TOKENIZER, TOKENS[:2], SAMPLING, num_samples=3, concurrency=1))
    assert found == expected(tokens=TOKENS[:2])
    assert often.is_set()


def test_a_failure_long_ago_does_not_shorten_the_patience(quick, monkeypatch):
    clock = SimpleNamespace(now=1.0)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def before(number, body):
        clock.now += 100.0 if number == 10 else 0.0
        return 500 if number in (1, 15) else None

    with FakeServer() as fake:
        fake.before = before
        found = dict(sample_servers([fake.url], TOKENIZER, TOKENS, SAMPLING, num_samples=3, concurrency=1, patience=60))
    assert found == expected()


def test_a_server_that_comes_back_is_waited_for(quick):
    with FakeServer(seconds=0.02) as fake:

        def restart():
            fake.stop()
            time.sleep(1.0)
            fake.before = lambda number, body: None
            fake.start()

        def before(number, body):
            if number == 5:
                threading.Thread(target=restart).start()
            return 500 if number >= 5 else None

        fake.before = before
        found = dict(sample_servers([fake.url], TOKENIZER, TOKENS, SAMPLING, num_samples=3, concurrency=2, patience=20))
    assert found == expected()


def test_a_server_that_is_gone_for_good_is_said_so_and_what_came_is_kept(quick):
    found, began = [], time.monotonic()
    with FakeServer() as fake:
        fake.before = lambda number, body: fake.stop() if number == 10 else None
        results = sample_servers([fake.url], TOKENIZER, TOKENS, SAMPLING, num_samples=3, concurrency=1, patience=0.5)
        with pytest.raises(ServersLost, match=rf"No vLLM server is left at {fake.url}: none within 0.5 s"):
            found.extend(results)
    assert time.monotonic() - began < 25
    assert 9 <= len(found) < len(TOKENS)
    assert dict(found).items() <= expected().items()


def test_a_request_that_always_fails_ends_the_run(quick):
    with FakeServer() as fake:
        fake.before = lambda number, body: 500 if body["prompt"] == TOKENS[3] else None
        with pytest.raises(ServersLost, match=r"The request of prompt 3 failed 5 times.*HTTP 500"):
            dict(sample_servers([fake.url], TOKENIZER, TOKENS, SAMPLING))


def test_requests_that_fail_when_the_server_is_given_up_already_are_not_blamed(quick):
    with FakeServer() as fake:

        def before(number, body):
            fake.healthy = False
            time.sleep(2.0 if number == 1 else 0.0)
            return 500

        fake.before = before
        with pytest.raises(ServersLost, match="No vLLM server is left"):
            dict(sample_servers([fake.url], TOKENIZER, TOKENS, SAMPLING, concurrency=2, patience=0.3))


def test_a_server_that_hangs_is_not_waited_for_for_ever(quick):
    with FakeServer() as fake:
        fake.before = lambda number, body: time.sleep(60) if number == 2 else None
        began = time.monotonic()
        found = dict(sample_servers([fake.url], TOKENIZER, TOKENS, SAMPLING, num_samples=3, concurrency=2, timeout=2))
    assert found == expected()
    assert time.monotonic() - began < 20


def test_closing_ends_what_is_in_flight():
    with FakeServer() as fake:
        fake.before = lambda number, body: time.sleep(60) if number > 4 else None
        results = sample_servers([fake.url], TOKENIZER, TOKENS, SAMPLING, concurrency=4)
        others = set(threading.enumerate())
        next(results)
        workers = [thread for thread in set(threading.enumerate()) - others if thread.name.endswith("(_work)")]
        assert len(workers) == 4
        began = time.monotonic()
        results.close()
        for worker in workers:  # closing itself does not wait for them for long
            worker.join(20)
        assert time.monotonic() - began < 20
        assert not any(worker.is_alive() for worker in workers)
        assert len(fake.requests) < 10


BAD = {
    "refused": ({}, {}, r"refuses a request \(HTTP 400\): so it was asked for"),
    "long prompts": ({"tokens": [[1] * 60]}, {}, r"longest prompt has 60 tokens; with 8 .* more than the 64"),
    "no server": ({"urls": []}, {}, "There is no server to sample from"),
    "nobody there": ({"urls": ["http://127.0.0.1:9"]}, {}, r"There is no vLLM server at .*serve MODEL"),
    "no URL": ({"urls": ["ftp://x"]}, {}, "is not the URL of a server"),
    "seeds": ({}, {"seeds": [1]}, "There are 1 seeds for 40 prompts"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_one_message(case):
    changes, settings, message = BAD[case]
    with FakeServer() as fake:
        fake.before = lambda number, body: 400
        given = {"urls": [fake.url], "tokens": TOKENS, **changes}
        with pytest.raises(ValueError, match=message):
            dict(sample_servers(given["urls"], TOKENIZER, given["tokens"], SAMPLING, **settings))


def test_a_server_says_what_it_serves_and_the_shortest_context():
    class Several(FakeServer):
        def get(self, path):
            return {"data": self.cards} if path == "/v1/models" else None

    with Several() as fake:
        fake.cards = [{"id": "a", "root": "r", "max_model_len": 64}, {"id": "b", "root": "r", "max_model_len": 32}]
        assert ask_server(fake.url) == ServerFacts(("a", "r", "b"), 32)
        fake.cards = [{"id": "a"}]
        assert ask_server(fake.url) == ServerFacts(("a",), None)
        fake.cards = "nothing of the kind"
        with pytest.raises(ValueError, match="is no vLLM server"):
            ask_server(fake.url)
        fake.healthy = False
        with pytest.raises(OSError, match="503"):
            ask_server(fake.url)
