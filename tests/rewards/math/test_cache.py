"""Remembered verdicts: bounds, order of forgetting, threads."""

import threading

from basis_rl.rewards.math.cache import Verdicts


def test_the_least_recently_used_goes_first():
    verdicts = Verdicts(entries=3)
    verdicts.remember({(str(i), "a"): "right" for i in range(3)})
    assert verdicts.find([("0", "a"), ("9", "a")]) == {("0", "a"): "right"}
    verdicts.remember({("3", "a"): "no_gold"})
    known = {("0", "a"): "right", ("2", "a"): "right", ("3", "a"): "no_gold"}
    assert verdicts.find([(str(i), "a") for i in range(4)]) == known


def test_memory_is_bounded_whatever_the_answers():
    verdicts = Verdicts(entries=100, characters=50)
    for i in range(200):
        verdicts.remember({(str(i), "x" * (i % 90)): "wrong", (str(i), "y"): "right"})
        held = verdicts.find([(str(j), text) for j in range(i + 1) for text in ("x" * (j % 90), "y")])
        assert len(verdicts._known) == len(held) <= 100
        assert all(len(gold) + len(answer) <= 50 for gold, answer in held)
    for verdict in ("wrong", "right"):  # the same pair twice is counted once
        verdicts.remember({("12", "345"): verdict})
    assert verdicts.find([("12", "345")]) == {("12", "345"): "right"}
    assert len(verdicts._known) <= 100


def test_threads_do_not_disturb_each_other():
    verdicts = Verdicts(entries=50)
    wrong = []

    def work(seed):
        for i in range(2000):
            pair = (str((i * seed) % 97), "a")
            verdicts.remember({pair: int(pair[0]) % 2 == 0})
            wrong.extend(p for p, v in verdicts.find([pair, ("5", "a")]).items() if v != (int(p[0]) % 2 == 0))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (3, 5, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(verdicts._known) <= 50
