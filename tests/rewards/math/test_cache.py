"""Remembered verdicts: bounds, order of forgetting, threads."""

import threading

from basis_rl.rewards.math.cache import Verdicts


def test_the_oldest_go_first_and_long_pairs_are_not_kept():
    verdicts = Verdicts(entries=3, characters=50)
    for i in range(5):
        verdicts.remember({(str(i), "a"): "right", (str(i), "x" * 50): "unequal"})
        # The same pair twice is counted once.
        verdicts.remember({(str(i), "a"): "right"})
    asked = [(str(i), answer) for i in range(5) for answer in ("a", "x" * 50)]
    assert verdicts.find(asked) == {(str(i), "a"): "right" for i in (2, 3, 4)}


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
