"""Samplers that weigh each prompt by its believed value V, on the scale from 0 to 1."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from basis_rl.samplers.base import WeightedSampler, correction


class _ByValue(WeightedSampler):
    """``w_i = f(V_i) + floor + bonus * sd_i``, sd being the standard deviation of the belief about V.

    Args:
        floor: > 0: every prompt keeps a positive chance, and a belief that is wrong or has aged is noticed.
        bonus: >= 0, what uncertainty is worth: prompts that were hardly seen are drawn more often.
        correct: weigh advantages by ``(n / P) / pi_i``: the uniform objective again, with more variance.
        clip: bounds of that ratio.

    Raises:
        ValueError: a parameter out of its range.
    """

    def __init__(self, floor: float, bonus: float, correct: bool, clip: Sequence[float]) -> None:
        if not floor > 0 or not bonus >= 0:
            raise ValueError(f"{type(self).__name__} needs floor > 0 and bonus >= 0, got {floor} and {bonus}.")
        self.floor = floor
        self.bonus = bonus
        self.correct, self.clip = correction(correct, clip)

    @abstractmethod
    def of_value(self, mean: Tensor) -> Tensor:
        """``f(V)``, ``(P,) -> (P,)``."""

    def weights(self, mean: Tensor, variance: Tensor) -> Tensor:
        return self.of_value(mean) + self.floor + self.bonus * variance.sqrt()


class Variance(_ByValue):
    """``w_i = V_i (1 - V_i) + floor``: the variance of a 0/1 reward, and so the expected size of an advantage.

    Solved and impossible prompts have only the floor: at 0.01 a twenty-sixth of a prompt at V = 0.5.
    """

    def __init__(
        self, floor: float = 0.01, bonus: float = 0.0, correct: bool = False, clip: Sequence[float] = (0.1, 10.0)
    ) -> None:
        super().__init__(floor, bonus, correct, clip)

    def of_value(self, mean: Tensor) -> Tensor:
        return mean * (1.0 - mean)


class Frontier(_ByValue):
    """``w_i = (1 - V_i)^hard V_i^easy + floor``: what can be learnt but is not yet, most at V = easy / (hard + easy).

    With the default exponents, 1 and 1/2, that is V = 1/3: against `variance` rarely solved prompts come first.
    """

    def __init__(
        self,
        hard: float = 1.0,
        easy: float = 0.5,
        floor: float = 0.02,
        bonus: float = 0.0,
        correct: bool = False,
        clip: Sequence[float] = (0.1, 10.0),
    ) -> None:
        super().__init__(floor, bonus, correct, clip)
        if not (hard >= 0 and easy > 0):
            raise ValueError(
                f"Frontier needs hard >= 0 and easy > 0, got {hard} and {easy}: with easy = 0 impossible prompts would "
                "take the largest share of the budget."
            )
        self.hard = hard
        self.easy = easy

    def of_value(self, mean: Tensor) -> Tensor:
        return (1.0 - mean) ** self.hard * mean**self.easy


class SpoWeights(_ByValue):
    """``w_i = sqrt(V_i (1 - V_i)) + 0.05``, the weights of SPO (Xu and Ding 2025, arXiv 2509.13232)."""

    def __init__(
        self, floor: float = 0.05, bonus: float = 0.0, correct: bool = False, clip: Sequence[float] = (0.1, 10.0)
    ) -> None:
        super().__init__(floor, bonus, correct, clip)

    def of_value(self, mean: Tensor) -> Tensor:
        return (mean * (1.0 - mean)).sqrt()


class DropSolved(_ByValue):
    """``w_i = 1`` where ``V_i <= solved``, else `floor`: every prompt alike that is not believed to be solved.

    Impossible prompts keep their share: use it where there are none.
    """

    def __init__(
        self,
        solved: float = 0.9,
        floor: float = 0.02,
        correct: bool = False,
        clip: Sequence[float] = (0.1, 10.0),
    ) -> None:
        super().__init__(floor, 0.0, correct, clip)
        if not 0 < solved < 1 or floor > 1:
            raise ValueError(f"DropSolved needs 0 < solved < 1 and floor <= 1, got {solved} and {floor}.")
        self.solved = solved

    def of_value(self, mean: Tensor) -> Tensor:
        return (1.0 - self.floor) * (mean <= self.solved).to(mean.dtype)
