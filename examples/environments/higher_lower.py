"""An environment in TRL's form: find a number by guesses that are answered with "higher", "lower" or "right"."""

from __future__ import annotations

import random
from typing import Any


class HigherLower:
    """The seed of a row decides about the number, so all rollouts of a row look for the same one.

    Args:
        size: the number is one of 1 to `size`.
        guesses: that are allowed.
    """

    # Declared, so that beliefs need not learn it.
    reward_range = (0.0, 1.0)

    def __init__(self, size: int = 15, guesses: int = 4) -> None:
        self.size = size
        self.guesses = guesses

    def reset(self, seed: int, **row: Any) -> str:
        """Begin a game; returns what is added to the user's turn."""
        self.number = random.Random(seed).randint(1, self.size)
        self.left = self.guesses
        self.found = False
        return f"Find my number from 1 to {self.size} in {self.guesses} guesses."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.

        Returns:
            Whether the number is higher or lower than the guess, or the guess is right, or the game is over.
        """
        if self.found or self.left == 0:
            return "over"
        self.left -= 1
        self.found = number == self.number
        if self.found:
            return "right"
        if self.left == 0:
            return "over"
        return "higher" if self.number > number else "lower"

    def get_reward(self) -> float:
        """1 if the number was found, else 0."""
        return float(self.found)
