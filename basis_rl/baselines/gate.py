"""EVPO's gate: a baseline is used while it explains rewards, else the mean of the batch's other rollouts is."""

from __future__ import annotations

from torch import Tensor

# Each batch counts 0.9 of the next one.
_FORGETTING = 0.9


class VarianceGate:
    """Whether a baseline has explained rewards in earlier batches: ``EV = 1 - sum Var(r - b) / sum Var(r) > 0``.

    EVPO, Pan et al. 2026, arXiv:2604.19485: where EV is 0 or less, the baseline adds more variance to the advantages
    than it takes away, and one number for the whole batch is better. There b is a critic; here it may be any belief.

    Departures: the paper asks the batch at hand, here older ones count, each 0.9 of the next, so that the choice does
    not depend on the own reward; its mean contains the own reward, `basis_rl.baselines.base.mean_of_others` does not.
    Before the first batch the gate is closed.

    Metrics: ``gate``, 1 while it is open; ``gate_explained_variance``, EV.

    Args:
        is_on: whether there is a gate. Without one the baseline is always used.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        # Sums over batches of Var(r - b) and of Var(r).
        self.variances = (0.0, 0.0)

    @property
    def is_open(self) -> bool:
        unexplained, total = self.variances
        return not self.is_on or unexplained < total

    def learn(self, baseline: Tensor, returns: Tensor, mask: Tensor) -> None:
        """Take in what the baseline was and what came, tensors of one shape, where the mask is."""
        if self.is_on and int(mask.sum()) > 1:
            found = returns.double()[mask]
            away = found - baseline.double()[mask]
            unexplained, total = self.variances
            unexplained = _FORGETTING * unexplained + float(away.var(correction=0))
            self.variances = (unexplained, _FORGETTING * total + float(found.var(correction=0)))

    def metrics(self) -> dict[str, float]:
        unexplained, total = self.variances
        told = {"gate_explained_variance": 1.0 - unexplained / total} if total > 0 else {}
        return {"gate": float(self.is_open), **told} if self.is_on else {}
