"""Data that passes between the layers.

Shape legend, used by every docstring of the package:

| letter | what it counts |
|---|---|
| ``N`` | rollouts of one generation batch, over all ranks |
| ``T`` | completion tokens, padded to the longest completion of the batch |
| ``P`` | prompts |
| ``G`` | rollouts per prompt (``num_generations``) |
| ``F`` | reward functions |
| ``H`` | numbers of a hidden state of the policy |
| ``K`` | candidate values of the tilt ``beta`` |
| ``n`` | reference rollouts per prompt in a value table |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor


def _signal(shape: str) -> Any:
    """A field of `RolloutBatch` that is there only where something asks for it, with its shape by the legend."""
    return field(default=None, metadata={"shape": shape})


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """One generation batch on the CPU, identical on every rank, rows in rank-major sampler order.

    Attributes:
        rewards: ``(N,)`` float32, weighted sum of the reward functions; NaN = could not be scored.
        turn_rewards: ``(N, T)`` float32, the part of the reward that belongs to turns, each at its turn's last token;
            the rest is the last token's. Only if the baseline asks, and None if no reward function has any.
        group_ids: ``(N,)`` int64, rollouts of one prompt share one id; groups may be ragged and in any order.
        prompt_ids: ``N`` stable names of the problems (`basis_rl.identity.prompt_id`), the keys into tables.
        action_mask: ``(N, T)`` bool, tokens that the policy sampled (no padding, no tool output).
        energies: ``(N, T)`` float32, ``w_t = 1 - 2 pi(y_t) + sum_v pi(v)^2``; only if the baseline asks.
        gradient_energies: ``(N, T)`` float32, ``|dL / dx_t|^2 / A_t^2``: squared norm of the loss's gradient in the
            output of one of the policy's last layers before each token, per unit of advantage; 0 where the loss has no
            gradient (`basis_rl.trainer.scoring.GradientEnergies` says in which layer). Only for `Baseline.update`, and
            only if the baseline asks.
        kl: ``(N, T)`` float32, KL penalty of each token, coefficient included; None unless KL is placed in the reward.
        rollout_weights: ``(N, T)`` float32, factors of the loss, ``pi_theta / pi_behaviour`` of token or rollout as
            ``vllm_importance_sampling_mode`` says, truncated, or 0 if masked; only if the baseline asks.
        log_probs: ``(N, T)`` float32, log-probabilities of the sampled tokens under the policy that sampled them, at
            the run's temperature; only if the baseline asks.
        entropies: ``(N, T)`` float32, entropies in nats of the distributions of these tokens under the same policy and
            temperature; only if the baseline asks.
        hidden_states: ``(N, 2, H)`` float32, what the policy's middle layer returned for the prompt's last token, and
            the mean over the ten tokens before the completion's last one; 0 for a row of which nothing is scored; only
            if the baseline asks (`basis_rl.trainer.scoring.PooledStates`).
        values: ``(N, T)`` float32, what the baseline's module predicts before each token; only if the baseline asks.
        reward_parts: ``(N, F)`` float32, each function's own reward, not weighted; NaN where it did not score the
            rollout; only if the baseline asks, as `reward_weights`.
        reward_weights: ``(F,)`` float32: a reward is ``sum_f weight_f part_f`` over the functions that scored it.
        greedy_rewards: ``(N,)`` reward of the prompt's greedy rollout; only if the baseline asks.
        prompt_texts: ``N`` texts of the prompts (of a conversation, what the user says); only if the baseline asks.
        step: index of the generation batch.
    """

    rewards: Tensor = field(metadata={"shape": "N"})
    group_ids: Tensor = field(metadata={"shape": "N"})
    prompt_ids: list[str] = field(metadata={"shape": "N"})
    action_mask: Tensor = field(metadata={"shape": "NT"})
    turn_rewards: Tensor | None = _signal("NT")
    energies: Tensor | None = _signal("NT")
    gradient_energies: Tensor | None = _signal("NT")
    kl: Tensor | None = _signal("NT")
    rollout_weights: Tensor | None = _signal("NT")
    values: Tensor | None = _signal("NT")
    log_probs: Tensor | None = _signal("NT")
    entropies: Tensor | None = _signal("NT")
    hidden_states: Tensor | None = _signal("N2H")
    reward_parts: Tensor | None = _signal("NF")
    reward_weights: Tensor | None = _signal("F")
    greedy_rewards: Tensor | None = _signal("N")
    prompt_texts: list[str] | None = _signal("N")
    step: int = 0

    def __post_init__(self) -> None:
        weights = self.reward_weights
        assert (self.reward_parts is None) == (weights is None), "reward_parts and reward_weights come together"
        assert self.action_mask.ndim == 2, f"action_mask must be (N, T), got {tuple(self.action_mask.shape)}"
        sizes = {"N": len(self.rewards), "T": self.action_mask.shape[1], "F": 0 if weights is None else len(weights)}
        sizes |= {"2": 2, "H": 0 if self.hidden_states is None else self.hidden_states.shape[-1]}
        for name, shape in _SHAPES.items():
            value = getattr(self, name)
            if value is not None:
                expected = tuple(sizes[letter] for letter in shape)
                found = tuple(value.shape) if isinstance(value, Tensor) else (len(value),)
                assert found == expected, f"{name} must be {expected}, got {found}"

    def take(self, rows: Tensor, tokens: int | None = None) -> RolloutBatch:
        """The batch with the rows `rows` (indices, ``(M,)``), in that order, and the first `tokens` columns."""
        taken: dict[str, Any] = {}
        for name, shape in _SHAPES.items():
            value = getattr(self, name)
            if value is None or shape[0] != "N":
                continue
            if isinstance(value, Tensor):
                taken[name] = value[rows][:, :tokens] if shape == "NT" else value[rows]
            else:
                taken[name] = [value[row] for row in rows.tolist()]
        return replace(self, **taken)


# Each optional signal of a batch, with its shape. A new one is a field here, and a row of the trainer that computes it.
SIGNALS: dict[str, str] = {f.name: f.metadata["shape"] for f in fields(RolloutBatch) if f.default is None}
# Those that come from the policy's update on the batch: `Baseline.learns_from` names them, not `Baseline.requires`.
OF_UPDATE = frozenset({"gradient_energies"})
_SHAPES: dict[str, str] = {f.name: f.metadata["shape"] for f in fields(RolloutBatch) if f.metadata}


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """What a baseline makes of a batch.

    Attributes:
        values: ``(N,)`` or ``(N, T)``; exactly 0 where the reward is NaN or the mask is 0.
        baseline: ``(N,)`` or ``(N, T)``, in reward units.
        metrics: scalars of this batch, already global (every rank computes the same ones).
    """

    values: Tensor
    baseline: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a baseline may check before a run starts (`Baseline.validate`).

    Attributes:
        prompts: id of every training prompt -> fingerprint of the text that the model is given for it.
        provenance: what identifies the run's rollouts and rewards (model, revision, chat template, reward, sampling).
            A key that is unknown is absent.
        texts: id of every training prompt -> its text (of a conversation, what the user says), or empty.
        reward_range: least and largest reward, where all reward functions declare theirs.
    """

    prompts: Mapping[str, str]
    provenance: Mapping[str, str | float]
    texts: Mapping[str, str] = field(default_factory=dict)
    reward_range: tuple[float, float] | None = None


def action_mask(inputs: Mapping[str, Any]) -> Tensor:
    """``(B, T)`` of TRL's batch, 1 on the tokens that the policy sampled: no padding, no output of tools."""
    return inputs["completion_mask"] * inputs.get("tool_mask", 1)
