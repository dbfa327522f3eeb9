"""What is believed about a prompt that was never sampled, from its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines.base import with_room
from basis_rl.functional.regression import hashed_words, predicted_logits, regression_update

_WIDTH = 128
NO_TEXTS: Mapping[str, str] = {}
# What a batch leaves of the certainty of those before it: the policy moves, and not all texts alike.
_KEEP = 0.999


class TextPrior:
    """``x_i ~ N(w . phi_i, phi_i S phi_i' + own)`` about the logit of prompt i, beside the shift that all have in
    common.

    ``phi`` are hashed words and pairs of words; ``w ~ N(m, S)`` is learnt from all rewards so far by Bayesian logistic
    regression. Before the first batch the variance is that of the flat prior: three quarters of it are what texts may
    explain, one quarter (`own`) is what no text tells.

    Args:
        variance: of the flat prior, > 0.
    """

    def __init__(self, variance: float) -> None:
        self.own = variance / 4
        self.mean = torch.zeros(_WIDTH, dtype=torch.float64)
        self.covariance = 0.75 * variance * torch.eye(_WIDTH, dtype=torch.float64)
        self._row: dict[str, int] = {}
        # A million prompts are 256 MB.
        self._features = torch.zeros((0, _WIDTH), dtype=torch.float16)

    def know(self, texts: Mapping[str, str]) -> None:
        """Take in the texts of prompts, by their ids; for all calls to come."""
        new = {name: text for name, text in texts.items() if name not in self._row}
        if new:
            known = len(self._row)
            self._row.update({name: known + place for place, name in enumerate(new)})
            self._features = with_room(self._features, len(self._row))
            self._features[known : len(self._row)] = hashed_words(list(new.values()), _WIDTH).half()

    def __call__(self, prompt_ids: Sequence[str], texts: Mapping[str, str] = NO_TEXTS) -> tuple[Tensor, Tensor]:
        """Mean and variance of the logits, ``(P,), (P,)`` float64.

        Args:
            prompt_ids: of the prompts.
            texts: of those that were not taken in; a prompt without a text has mean and variance of no words.
        """
        features = self._of(prompt_ids)
        new = [row for row, name in enumerate(prompt_ids) if name not in self._row and name in texts]
        if new:
            # Rounded as what is taken in.
            features[new] = hashed_words([texts[prompt_ids[row]] for row in new], _WIDTH).half().float()
        mean, variance = predicted_logits(self.mean.float(), self.covariance.float(), features)
        return mean.double(), variance.double() + self.own

    def _of(self, prompt_ids: Sequence[str]) -> Tensor:
        rows = torch.tensor([self._row.get(name, -1) for name in prompt_ids], dtype=torch.long)
        features = torch.zeros((len(rows), _WIDTH), dtype=torch.float32)
        features[rows >= 0] = self._features[rows[rows >= 0]].float()
        return features

    def update(self, prompt_ids: Sequence[str], rewards: Tensor, shift: float) -> None:
        """Learn from ``(N,)`` rewards in [0, 1], NaN where there is none."""
        features = self._of(prompt_ids).double()
        self.mean, self.covariance = regression_update(self.mean, self.covariance / _KEEP, features, rewards, shift)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.clone(), "covariance": self.covariance.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean = state["mean"].clone()
        self.covariance = state["covariance"].clone()
