"""Signals that passes of the policy give beside log-probabilities: energies, entropies, states, gradients."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from trl.trainer.utils import add_fused_lm_head

from basis_rl.functional.energy import logit_gradient_energy
from basis_rl.trainer.packing import IGNORED, Scorer

Output = dict[str, Any]
_logger = logging.getLogger(__name__)
# Tokens whose states are averaged.
_POOLED = 10
# A fifth of the layers lies above what energies of whole rollouts are measured in.
_DEPTH = 5


def layers_of(policy: Any) -> Sequence[nn.Module]:
    """The layers of a policy's decoder, from the first to the last; empty if it has no list of them."""
    count = getattr(policy.config.get_text_config(), "num_hidden_layers", None)
    for part in policy.base_model.get_decoder().modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return list(part)
    return ()


class ScoringPass(ABC):
    """Records a quantity during the forward pass that gives the old log-probabilities, which saves a second pass.

    TRL makes that pass when it wants the old log-probabilities; where it does not (one update per batch, no vLLM
    correction), the trainer makes one for all recorders.

    Class attributes:
        of_tokens: whether what is recorded has a column for each token of a row but the first.
    """

    of_tokens: bool = True

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._listening = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it, the first scoring pass over the policy is recorded: TRL scores it before the reference model."""
        self._chunks = []
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def listen(self, model: Any, scorer: Scorer) -> Any:
        """`model`, or for the first scoring pass of a recording a callable that also keeps what is wanted.

        Args:
            model: `scorer`, or what another pass made of it.
            scorer: calls the policy.
        """
        if not self._listening:
            return model
        self._listening = False
        return lambda **inputs: self._record(model, scorer, inputs)

    @abstractmethod
    def _record(self, model: Any, scorer: Scorer, inputs: dict[str, Any]) -> Any:
        """What `model` returns; what is wanted of it goes into ``self._chunks``."""

    def take(self, output: Output) -> Tensor:
        """``(B, ...)`` of this rank's completions, from the latest pass that was recorded."""
        tokens = output["completion_ids"].shape[1]
        result = torch.cat([chunk[:, -tokens:] if self.of_tokens else chunk for chunk in self._chunks])
        self._chunks = []
        return result


class EnergyRecorder(ScoringPass):
    """Lets TRL's fused LM head also return ``log sum_v pi(v)^2``, and keeps the ``(B, T)`` energies of a scoring pass.

    The head computes it tile by tile, so no ``(B, T, V)`` tensor is ever made.
    """

    def __init__(self, model: Any, *, temperature: float, fp32_head: bool) -> None:
        super().__init__()
        add_fused_lm_head(
            model.get_base_model() if is_peft_model(model) else model,
            temperature=temperature,
            cast_lm_head_to_fp32=fp32_head,
            outputs=("log_probs", "entropy", "log_sum_sq_probs"),
        )

    def _record(self, model: Any, scorer: Scorer, inputs: dict[str, Any]) -> Any:
        output = model(**inputs)
        # The reference model's head does not compute it.
        if output.log_sum_sq_probs is not None:
            self._chunks.append(logit_gradient_energy(output.log_probs, output.log_sum_sq_probs.exp()))
        return output


class EntropyRecorder(ScoringPass):
    """Entropy of the policy's distribution of each completion token, ``(B, T)``."""

    def _record(self, model: Any, scorer: Scorer, inputs: dict[str, Any]) -> Any:
        output = model(**inputs)
        self._chunks.append(output.entropy)
        return output


class HiddenStates(ScoringPass):
    """The policy's last hidden states before each completion token, ``(B, T, H)``."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy: Any = policy.get_base_model() if is_peft_model(policy) else policy
        # What returns the states, alone or first.
        self.module: nn.Module = self.policy.base_model

    def _record(self, model: Any, scorer: Scorer, inputs: dict[str, Any]) -> Any:
        seen: list[Any] = []
        hook = self.module.register_forward_hook(lambda _, __, found: seen.append(found))
        try:
            output = model(**inputs)
        finally:
            hook.remove()
        # Nothing was seen if the reference was called: the hook is on the policy.
        for found in seen:
            states = scorer.before_tokens(found if isinstance(found, Tensor) else found[0])
            self._chunks.append(self._kept(states, inputs["labels"][:, 1:] != IGNORED))
        return output

    def _kept(self, states: Tensor, scored: Tensor) -> Tensor:
        """What is kept of the states before each token, of which some are `scored`."""
        return states


class PooledStates(HiddenStates):
    """``(B, 2, H)`` float32 states of the policy's middle layer (`RolloutBatch.hidden_states`).

    The layer is the one with the index ``layers // 2 + 1``, from 0: 19 of the 36 of Qwen3-4B, the best of POISE's
    Table 8. A row that has nothing scored has 0.

    Raises:
        ValueError: the policy has no list of its layers.
    """

    of_tokens = False

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        layers = layers_of(self.policy)
        if not layers:
            kind = type(self.policy).__name__
            raise ValueError(
                f"The baseline reads states of a layer, and {kind} has no list of layers. Take another one."
            )
        self.module = layers[min(len(layers) // 2 + 1, len(layers) - 1)]

    def _kept(self, states: Tensor, scored: Tensor) -> Tensor:
        kept = states.new_zeros((len(states), 2, states.shape[-1]), dtype=torch.float32)
        # Learnt prompts may stand before the row's own tokens.
        for row, own, which in zip(kept, states[:, -scored.shape[1] :], scored, strict=True):
            before = own[which].float()
            if len(before):
                row[0] = before[0]
                row[1] = before[-_POOLED:].mean(dim=0)
        return kept


class GradientEnergies:
    """Keeps ``|dL / dx_t|^2 / A_t^2`` of each token of the loss's own pass (`RolloutBatch.gradient_energies`).

    Where tokens have advantages of their own, ``x_t`` is what the policy's last layer returns, since only the token's
    own loss passes through it. It is found by running the policy: it enters the last module that the backbone calls,
    as a rule the final norm. Where a rollout has one advantage, ``x_t`` is what the layer a fifth of all below it
    returns (6 below of 30; with fewer than 5 layers, the last). Losses of later tokens pass through it too, and the
    rollout's energy, their sum, is then close to that of the whole gradient (docs/estimators.md).

    Equal rollouts go through the policy once, so its gradient there is divided by the sum of their ``|A|``. Where
    other rollouts only begin alike, that gives at most the largest of their energies.

    Args:
        policy: before it is wrapped for training.
    """

    def __init__(self, policy: Any) -> None:
        plain: Any = policy.get_base_model() if is_peft_model(policy) else policy
        self._modules = [module for module in plain.base_model.modules() if not any(module.children())]
        layers = layers_of(plain)
        below = len(layers) // _DEPTH
        self._above = layers[len(layers) - below] if below else None
        self.warned = False

    @staticmethod
    def prepare(output: Output, rank: int) -> None:
        """Add to a rank's generation batch each row's place in that of all ranks, since rows will move, and room for
        the energies."""
        rows = len(output["completion_ids"])
        output["global_row"] = torch.arange(rows, device=output["completion_ids"].device) + rank * rows
        output["gradient_energies"] = torch.zeros_like(output["completion_mask"], dtype=torch.float32)

    @contextmanager
    def of_loss(self, inputs: Output, scorer: Scorer) -> Iterator[None]:
        """Within it the policy is run for the loss of a micro-batch, which gets its energies in the backward pass.

        A micro-batch that comes again (``num_iterations``) keeps those of the first pass.
        """
        if "global_row" not in inputs or inputs["gradient_energies"].any():
            yield
            return
        advantages = inputs["advantages"].float()
        inner = self._above if advantages.ndim == 1 else None
        entered: dict[bool, Tensor] = {}

        def keep(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            given = args[0] if args else named.get("hidden_states")
            if isinstance(given, Tensor) and given.ndim == 3:
                entered[module is inner] = given

        modules = self._modules if inner is None else [*self._modules, inner]
        hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        tokens = inputs["gradient_energies"].shape[1]
        each = advantages if advantages.ndim == 2 else advantages[:, None].expand(-1, tokens)
        squares = scorer.over_shared(each.abs()) ** 2
        before_tokens = scorer.before_tokens

        def energies(gradient: Tensor | None) -> None:
            # Of a compiled model, in which nothing uses the tensor itself.
            if gradient is None:
                return
            norms = before_tokens(gradient.float().square().sum(dim=-1, keepdim=True))[:, -tokens:, 0]
            inputs["gradient_energies"] = torch.where(each * squares != 0, norms / squares, 0.0)

        # Below the first layer that is trained there is no gradient.
        reached = [entered[which] for which in (True, False) if which in entered and entered[which].requires_grad]
        if reached:
            reached[0].register_hook(energies)

    def taken(self, micro_batches: Sequence[Output]) -> tuple[Tensor, Tensor]:
        """The places ``(B,)`` and the energies ``(B, T)`` of the rows that this rank has trained on; warns once if the
        loss tells nothing."""
        found = torch.cat([each["gradient_energies"] for each in micro_batches])
        if not self.warned and not found.any() and any(bool(each["advantages"].any()) for each in micro_batches):
            self.warned = True
            if PartialState().is_main_process:
                _logger.warning(
                    "The loss has no gradient in what the policy's last layer returns: nothing up to there is trained, "
                    "or the model is compiled (torch_compile). So the baseline cannot learn its target and stays the "
                    "value. Set baseline_kwargs: {target: value}, or change that."
                )
        return torch.cat([each["global_row"] for each in micro_batches]), found
