"""The client against fake servers: what is asked, what comes back, and what servers do that die, hang or refuse.

The real server is in test_vllm.py.
"""

import dataclasses
import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from basis_rl.engine import Completion, Sampling, ServersLost, client, sample_servers
from basis_rl.engine.client import Client, NoServer, ServedModel, checked_choices, request_seed
from basis_rl.run.errors import RequestRefused, RolloutError, WrongAnswer
from tests.support.dripping import dripping
from tests.support.fake_vllm import FakeServer, completion
from tests.support.tiny import tiny_tokenizer

TOKENS = [[3 + i, 7, i] for i in range(40)]
SAMPLING = Sampling(max_new_tokens=8)
TOKENIZER = tiny_tokenizer()
NOBODY = "http://127.0.0.1:9"


def draw(*servers, tokens=TOKENS, sampling=SAMPLING, **settings):
    urls = [each if isinstance(each, str) else each.url for each in servers]
    given = {"num_samples": 3, "seeds": [request_seed(0, i) for i in range(len(tokens))], **settings}
    return dict(sample_servers(urls, TOKENIZER, tokens, sampling, **given))


def answered(prompt, seed):
    made = completion(prompt, seed, SAMPLING.max_new_tokens)
    text = TOKENIZER.decode(made["token_ids"], skip_special_tokens=True)
    return Completion(text, made["token_ids"], made["finish_reason"] == "length")


def expected(tokens=TOKENS):
    return {i: [answered(prompt, request_seed(0, i) + k) for k in range(3)] for i, prompt in enumerate(tokens)}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(client, "_LONGEST_PAUSE", 0.1)


@pytest.fixture
def fake():
    with FakeServer() as running:
        yield running


def ask(url, timeout=10.0):
    return Client(url, timeout).ask("/v1/completions", {"prompt": [1], "n": 1, "temperature": 1.0})


@pytest.mark.parametrize("status", [400, 404, 408, 413, 429, 500, 503])
def test_only_what_would_fail_each_time_is_the_requests_fault_and_nothing_is_asked_twice(status, fake):
    fake.before = lambda number, body: status
    kind = RequestRefused if status in (400, 404, 413) else RolloutError
    with pytest.raises(kind, match=f"HTTP {status}.*so it was asked for"):
        ask(fake.url)
    assert len(fake.requests) == 1


def test_a_session_has_the_servers_key_no_proxy_and_tells_a_server_that_hangs(fake, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("HTTP_PROXY", NOBODY)
    reached = Client(fake.url)
    assert reached.is_healthy()
    assert reached.session.headers["Authorization"] == "Bearer secret"
    fake.before = lambda number, body: time.sleep(5)
    with pytest.raises(RolloutError, match=r"no whole answer within 0\.2 s"):
        ask(fake.url, timeout=0.2)
    assert len(fake.requests) == 1
    with pytest.raises(RolloutError, match="refused"):
        ask(NOBODY)


def test_a_redirect_is_refused_by_name_and_not_followed(fake):
    head = f"HTTP/1.1 307 Go\r\nLocation: {fake.url}/\x1b[31m\r\nContent-Length: 0\r\n\r\n"
    with dripping(head.encode()) as url:
        with pytest.raises(RequestRefused, match=rf"at {url}/v1/completions .*a redirect to {fake.url}/") as refused:
            ask(url)
        assert "\x1b" not in str(refused.value)
        with pytest.raises(ValueError, match="a redirect to"):
            Client(url).model()
    assert not fake.requests


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("said", [b"[" * 100_000, b"\x1b]0;mine\x07\x1b[2J\xe2\x80\xae no"])
def test_json_that_is_nested_too_deeply_and_letters_that_control_a_terminal_fail_in_one_short_message(said, status):
    head = f"HTTP/1.1 {status} So\r\nContent-Length: {len(said)}\r\n\r\n".encode()
    with dripping(head + said) as url, pytest.raises(RequestRefused if status == 400 else RolloutError) as failed:
        ask(url)
    assert len(str(failed.value)) < 700
    assert "\x1b" not in str(failed.value)
    assert (r"\x1b]0;mine\x07\x1b[2J\x202e no" in str(failed.value)) == (b"mine" in said and status != 200)
    assert type(failed.value)(*failed.value.args).args == failed.value.args, "the same on the way to another rank"


def test_a_server_says_what_it_serves_and_the_shortest_context():
    class Several(FakeServer):
        def get(self, path):
            return {"data": self.cards} if path == "/v1/models" else None

    with Several() as fake:
        asked = Client(fake.url)
        fake.cards = [{"id": "a", "root": "r", "max_model_len": 64}, {"id": "b", "root": "r", "max_model_len": 32}]
        assert asked.model() == ServedModel(("a", "r", "b"), 32)
        fake.cards = [{"id": "a"}]
        assert asked.model() == ServedModel(("a",), None)
        fake.cards = "nothing of the kind"
        with pytest.raises(NoServer, match="There is no vLLM server"):
            asked.model()
        assert asked.is_healthy()
        fake.healthy = False
        assert not asked.is_healthy()


def test_each_prompt_is_one_request_with_every_setting_stated(fake):
    settings = Sampling(8, 0.7, 0.9, 20, 0.01, 1.1, {"min_tokens": 2})
    assert draw(fake, sampling=settings, stop_token_ids=[5]) == expected()
    assert sorted(body["prompt"] for body in fake.requests) == sorted(TOKENS)
    stated = {k: v for k, v in fake.requests[0].items() if k not in ("prompt", "seed")}
    names = {"max_new_tokens": "max_tokens"}
    given = {names.get(k, k): v for k, v in dataclasses.asdict(settings).items() if k != "generation_kwargs"}
    given |= {"n": 3, "stop_token_ids": [5], "min_tokens": 2, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert given.items() <= stated.items()


def test_no_more_requests_are_in_flight_than_asked_for_and_a_faster_server_does_more():
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
        draw(fast, slow, concurrency=2)
    assert (len(fast.requests), len(slow.requests)) == (len(TOKENS) - 2, 2)
    assert fast.most == slow.most == 2


def test_seeds_are_those_of_the_caller_or_apart(fake):
    draw(fake, num_samples=64)
    starts = sorted(body["seed"] for body in fake.requests)
    assert all(later - earlier >= 64 for earlier, later in itertools.pairwise(starts))
    assert starts[-1] < 2**53, "a number of JSON"
    fake.requests.clear()
    draw(fake, tokens=TOKENS[:3], seeds=[7, 5, 9])
    assert {body["prompt"][0]: body["seed"] for body in fake.requests} == {3: 7, 4: 5, 5: 9}


@pytest.mark.parametrize("status", [500, 429, 408])
def test_what_fails_is_asked_again(status, quick, fake):
    fake.before = lambda number, body: status if number % 3 == 0 else None
    assert draw(fake, concurrency=4) == expected()
    assert len(fake.requests) > len(TOKENS)


@pytest.mark.parametrize(("bad", "patience"), [("away at the start", 0.5), ("sick", 600.0), ("dies", 0.3)])
def test_one_bad_server_does_not_take_the_others_down(bad, patience, quick):
    with FakeServer(seconds=0.05) as stays, FakeServer() as other:

        def before(number, body):
            if bad == "dies" and number == 5:
                threading.Thread(target=other.stop).start()
            return 500 if bad == "sick" or number >= 5 else None

        other.before = before
        first = NOBODY if bad == "away at the start" else other
        assert draw(first, stays, concurrency=8, patience=patience) == expected()


def test_a_failure_long_ago_does_not_shorten_the_patience(quick, fake, monkeypatch):
    clock = SimpleNamespace(now=1.0)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def before(number, body):
        clock.now += 100.0 if number == 10 else 0.0
        return 500 if number in (1, 15) else None

    fake.before = before
    assert draw(fake, concurrency=1, patience=60) == expected()


def test_a_server_that_is_gone_for_good_is_said_so_and_what_came_is_kept(quick, fake):
    found, began = [], time.monotonic()
    fake.before = lambda number, body: fake.stop() if number == 10 else None
    seeds = [request_seed(0, i) for i in range(len(TOKENS))]
    given = {"num_samples": 3, "concurrency": 1, "patience": 0.5}
    results = sample_servers([fake.url], TOKENIZER, TOKENS, SAMPLING, seeds=seeds, **given)
    with pytest.raises(ServersLost, match=rf"No vLLM server is left at {fake.url}.* 0.5 s .*refused"):
        found.extend(results)
    assert time.monotonic() - began < 25
    assert 9 <= len(found) < len(TOKENS)
    assert dict(found).items() <= expected().items()


def test_a_request_that_always_fails_ends_the_run(quick, fake):
    fake.before = lambda number, body: 500 if body["prompt"] == TOKENS[3] else None
    with pytest.raises(ServersLost, match=r"none answered within 0\.5 s .*HTTP 500"):
        draw(fake, patience=0.5)


def test_a_server_that_hangs_is_not_waited_for_for_ever(quick, fake):
    fake.before = lambda number, body: time.sleep(60) if number == 2 else None
    began = time.monotonic()
    assert draw(fake, concurrency=2, timeout=2) == expected()
    assert time.monotonic() - began < 20


def test_closing_ends_what_is_in_flight(fake):
    fake.before = lambda number, body: time.sleep(60) if number > 4 else None
    results = sample_servers([fake.url], TOKENIZER, TOKENS, SAMPLING, seeds=range(len(TOKENS)), concurrency=4)
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
    "refused": ([], TOKENS, {}, r"refuses a request \(HTTP 400\): so it was asked for"),
    "long prompts": ([], [[1] * 57], {}, r"longest prompt has 57 tokens; with 8 .* more than the 64"),
    "no server": (None, TOKENS, {}, "There is no server to sample from"),
    "nobody there": ([NOBODY], TOKENS, {}, r"There is no vLLM server at .*serve MODEL"),
    "no URL": (["ftp://x"], TOKENS, {}, "is not the URL of a server"),
    "seeds": ([], TOKENS, {"seeds": [1]}, "There are 1 seeds for 40 prompts"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_one_message(case, fake):
    urls, tokens, settings, message = BAD[case]
    fake.before = lambda number, body: 400
    with pytest.raises(ValueError, match=message):
        draw(*([] if urls is None else urls or [fake]), tokens=tokens, **settings)


def test_a_prompt_and_its_completion_may_fill_the_context(fake):
    tokens = [[1] * 56]
    assert draw(fake, tokens=tokens) == expected(tokens)


ASKED = {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 4, "logprobs": 0}


def whole_answer():
    """To `ASKED`, of a model with 9 token ids; each completion has others."""
    rows = []
    for index, prompt in enumerate([[1, 2], [1, 2], [3], [3]]):
        ids = [index + k for k in range(1 + index)]
        logprobs = {"tokens": [f"token_id:{k}" for k in ids], "token_logprobs": [-0.5 - k for k in ids]}
        row = {"index": index, "prompt_token_ids": prompt, "token_ids": ids, "finish_reason": "stop"}
        rows.append({**row, "logprobs": {**logprobs, "top_logprobs": [None] * len(ids)}})
    return {"choices": rows}


def spoilt(field, value):
    """An answer whose second choice has another value of a field; one function of what it was, or the value."""

    def spoil(answer):
        *outer, last = field.split(".")
        place = answer["choices"][1]
        for name in outer:
            place = place[name]
        if value is KeyError:
            del place[last]
        else:
            place[last] = value(place[last]) if callable(value) else value

    return spoil


def nested(depth):
    """A list in a list in a list: deeper than Python's own recursion goes."""
    found = [1]
    for _ in range(depth):
        found = [found]
    return found


def renumbered(rows):
    return [{**row, "index": index} for index, row in enumerate(rows)]


def in_choices(change):
    def spoil(answer):
        answer["choices"] = change(answer["choices"])

    return spoil


NONSENSE = {
    "reversed, with its numbers": (in_choices(lambda rows: renumbered(rows[::-1])), "prompt_token_ids"),
    "one too many": (in_choices(lambda rows: [*rows, {**rows[0], "index": 4}]), "choices of index"),
    "one twice": (in_choices(lambda rows: [*rows[:-1], rows[0]]), "choices of index"),
    "no numbers": (spoilt("index", KeyError), "choices of index"),
    "another prompt": (spoilt("prompt_token_ids", [1, 3]), "prompt_token_ids"),
    "no ids": (spoilt("token_ids", KeyError), "token_ids"),
    "too many ids": (spoilt("token_ids", lambda ids: ids * 120), "token_ids of length 240; expected was 1 to 4"),
    "none": (spoilt("token_ids", []), "token_ids of length 0"),
    "not in the vocabulary": (spoilt("token_ids", [1, 9]), "ids from 0 to 8"),
    "negative": (spoilt("token_ids", [1, -1]), "ids from 0 to 8"),
    "fractions": (spoilt("token_ids", [1, 2.0]), "ids from 0 to 8"),
    "no log-probabilities": (spoilt("logprobs", None), "logprobs"),
    "of other tokens": (spoilt("logprobs.tokens", lambda tokens: tokens[::-1]), "logprobs of tokens"),
    "NaN": (spoilt("logprobs.token_logprobs", [-0.5, float("nan")]), "logprobs .*expected was 2 finite numbers"),
    "infinite": (spoilt("logprobs.token_logprobs", [-0.5, float("-inf")]), "numbers up to 0"),
    "positive": (spoilt("logprobs.token_logprobs", [-0.5, 0.5]), "numbers up to 0"),
    "negative, and too large for a float": (spoilt("logprobs.token_logprobs", [-0.5, -(10**400)]), "numbers up to 0"),
    "null for one": (spoilt("logprobs.token_logprobs", [-0.5, None]), "numbers up to 0"),
    "one log-probability too few": (spoilt("logprobs.token_logprobs", [-0.5]), "numbers up to 0"),
    "deep ids": (spoilt("token_ids", lambda ids: nested(2000)), "token_ids"),
}  # fmt: skip


@pytest.mark.parametrize("case", NONSENSE)
def test_an_answer_to_something_else_is_refused_by_its_field(case):
    spoil, field = NONSENSE[case]
    answer = whole_answer()
    spoil(answer)
    with pytest.raises(WrongAnswer, match=rf"The vLLM server at http://there answered with .*{field}"):
        checked_choices("http://there", ASKED, answer, 9)


def test_a_right_answer_is_taken_in_the_order_of_its_numbers():
    """Also as `/inference/v1/generate` gives it, which does not repeat its prompt."""
    expected = whole_answer()["choices"]
    mixed = [expected[i] for i in (2, 0, 3, 1)]
    assert checked_choices("http://there", ASKED, {"choices": mixed}, 9) == expected
    content = [{"token": "token_id:5", "logprob": -1, "top_logprobs": []}]
    row = {"index": 0, "token_ids": [5], "finish_reason": "length", "logprobs": {"content": content}}
    looping = {"choices": [{**choice, "finish_reason": "repetition"} for choice in mixed]}
    assert [row["finish_reason"] for row in checked_choices("http://there", ASKED, looping, 9)] == ["repetition"] * 4
    body = {"token_ids": [1, 2], "sampling_params": {"n": 1, "max_tokens": 4, "logprobs": 0}}
    assert checked_choices("http://there", body, {"choices": [row]}, 9) == [row]
    with pytest.raises(WrongAnswer, match="logprobs of tokens"):
        checked_choices("http://there", body, {"choices": [{**row, "token_ids": [6]}]}, 9)


def test_an_aborted_completion_is_asked_for_again():
    answer = whole_answer()
    spoilt("finish_reason", "abort")(answer)
    with pytest.raises(RolloutError, match=r"choices\[1\] ended by 'abort'"):
        checked_choices("http://there", ASKED, answer, 9)
