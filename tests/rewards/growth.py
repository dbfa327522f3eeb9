"""How the time of a function grows with its input."""

import time
from collections.abc import Callable


def seconds(work: Callable[[int], object], size: int) -> float:
    """The shortest of three runs."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        work(size)
        times.append(time.thread_time() - began)
    return min(times)


def grows_linearly(work: Callable[[int], object], small: int = 2000, factor: int = 8) -> bool:
    """Eight times the input takes less than 24 times as long: quadratic growth would take 64 times as long.

    What takes less than 30 ms on the large input passes: it is nothing to worry about, and too short to be measured.
    """
    large = seconds(work, small * factor)
    return large < 0.03 or large < 3 * factor * seconds(work, small)
