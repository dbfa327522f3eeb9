"""Scoring of rollouts without padding: what TRL hands a model as padded rows goes through it as one row of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers.models.mixtral import modeling_mixtral
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from basis_rl.engine.local import in_mode
from basis_rl.functional.packing import pack_rows, window_order
from basis_rl.run.seams import attributes
from basis_rl.trainer.attention import attention_name, is_known, let_through_packed_rows, types_of_rows_apart
from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.head import compact_head
from basis_rl.trainer.random_numbers import random_numbers_kept, random_states

# Tokens of the row by which a model is asked whether it draws random numbers.
ASKED = 8
# TRL's label for a token that is not scored.
IGNORED = -100
# Layers whose tokens meet in attention only, or have no other tokens to meet.
LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "mlp", "moe"}
# What TRL gives a text model; anything else belongs to images.
TEXT_ARGUMENTS = {"input_ids", "attention_mask", "labels", "fused_lm_head", "output_router_logits"}


@dataclass(frozen=True)
class Method:
    """How a model's rows are scored.

    Attributes:
        packed: as one row without padding; else as padded rows.
        shared: prefixes that rows share are computed once.
        trimmed: whether rows that are not packed begin in the same column, with the longest row's padding cut off.
        positions: whether padded rows need explicit positions, as with learned position embeddings.
        reason: why rows are not packed, or nothing is shared; empty where the user has said so.
        noisy: whether the model draws random numbers in training (dropout), so that no two passes are alike.
    """

    packed: bool
    shared: bool
    trimmed: bool
    positions: bool
    reason: str = ""
    noisy: bool = False

    def __str__(self) -> str:
        return ("shared" if self.shared else "packed") if self.packed else "padded"


def method_of(model: Any, args: BasisConfig, noisy: bool | None = None) -> Method:
    """The method for `model`, before it is wrapped for training, by its configuration and `args`.

    Args:
        model, args: the run's.
        noisy: whether the model draws random numbers in training; None asks it, or looks at the modules of one whose
            weights are not here (on the meta device, or sharded by ZeRO-3).
    """
    plain: Any = model.get_base_model() if is_peft_model(model) else model
    takes_positions = "position_ids" in inspect.signature(type(plain).forward).parameters
    prompts = any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values())
    says_positions = takes_positions and not prompts
    if noisy is None:
        noisy = draws_random_numbers(model) if has_weights(model) else has_dropout(model)
    if args.packing == "none":
        # Rotary positions are relative: what padding shifts them by changes nothing but rounding.
        rotary = any("Rotary" in type(module).__name__ for module in plain.modules())
        return Method(False, False, trimmed=False, positions=says_positions and not rotary, noisy=noisy)
    reason = "its prompts are learnt (PEFT)" if prompts else _reason(plain, args, takes_positions)
    if reason:
        return Method(False, False, trimmed=True, positions=says_positions, reason=reason, noisy=noisy)
    reason = "it draws random numbers in training (dropout), which rollouts would share" if noisy else ""
    return Method(True, not noisy, trimmed=True, positions=True, reason=reason, noisy=noisy)


def enable_packing(model: Any, args: BasisConfig, noisy: bool | None = None) -> Method:
    """`method_of`'s result, with the attention of `model` ready for packed rows; the reference is like the policy."""
    method = method_of(model, args, noisy)
    if method.packed:
        let_through_packed_rows(model.get_base_model() if is_peft_model(model) else model)
    return method


def _reason(model: Any, args: BasisConfig, takes_positions: bool) -> str:
    """Why rows of `model` cannot be packed; empty if they can."""
    config = model.config.get_text_config()
    # Next to attention, some layers mix a token with its neighbours in the row, which belong to another rollout.
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES - types_of_rows_apart(model)
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    if not takes_positions:
        return "its attention cannot be told where a rollout begins"
    if not is_known(attention_name(model)):
        return f"segments are not known to the attention '{attention_name(model)}'"
    if args.torch_compile:
        return "torch_compile would compile anew for every length"
    if getattr(args, "parallelism_config", None) is not None:
        return "parallelism_config splits rows"
    return ""


def has_weights(model: nn.Module) -> bool:
    """Whether the weights are here: not on the meta device, and not emptied by ZeRO-3, as on a single rank too."""
    return not any(weight.is_meta or hasattr(weight, "ds_id") for weight in model.parameters())


def has_dropout(model: Any) -> bool:
    """Whether modules or the configuration show dropout; a model that is asked knows of more."""
    of_attention = getattr(model.config.get_text_config(), "attention_dropout", 0.0) or 0.0
    return of_attention > 0 or any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules())


def draws_random_numbers(model: Any, **asked: Any) -> bool:
    """Whether a pass in training draws random numbers: dropout of any kind, skipped layers, a router's jitter.

    Args:
        model: is asked, which is collective if it is sharded.
        **asked: further arguments of its forward pass.
    """
    weight = next(model.parameters())
    with random_numbers_kept(weight.device), torch.no_grad(), in_mode(model, training=True):
        before = random_states(weight.device)
        ids = torch.ones(1, ASKED, dtype=torch.int64, device=weight.device)
        model(input_ids=ids, use_cache=False, **asked)
        return before != random_states(weight.device)


class Scorer:
    """A model that is called with padded ``(B, L)`` rows and a label for each token that is scored.

    Rows are packed, or trimmed, according to the method. Exactly one call of the model is made, whatever the rows are,
    so that all ranks of a sharded model meet.
    """

    def __init__(self, model: Any, method: Method) -> None:
        self.model = model
        self.method = method
        # Maps hidden states of the latest call to those before each token, (B, L - 1, H).
        self.before_tokens: Callable[[Tensor], Tensor] = _without_last
        # Sums ``(B, T)`` values of the latest call's tokens over the rows that share them.
        self.over_shared: Callable[[Tensor], Tensor] = _as_it_is
        # Tokens of the latest call that went through the model, and those that are scored.
        self.sizes = (0, 0)

    def __call__(self, **inputs: Any) -> Any:
        device = inputs["input_ids"].device
        text = set(inputs) <= TEXT_ARGUMENTS
        if self.method.packed and text:
            with compact_head(device):
                return self._packed(**inputs)
        if not self.method.trimmed or not text:
            return self._padded(inputs)
        with compact_head(device):
            return self._trimmed(inputs)

    def _packed(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **others: Any) -> Any:
        rows = pack_rows(input_ids, attention_mask, labels != IGNORED, share=self.method.shared)
        # A token that several rows share counts in the router's loss as often as it stands in rows.
        router_loss = partial(_router_loss, load_balancing_loss_func, rows.copies)
        with attributes(modeling_mixtral, load_balancing_loss_func=router_loss):
            aims = rows.labels(input_ids)
            output = self.model(**rows.model_inputs(input_ids), shift_labels=aims, **others)
        self.sizes = aims.numel(), int((aims != IGNORED).sum())
        self.before_tokens = rows.unpack
        self.over_shared = rows.over_shared
        return _each_row(output, rows.unpack)

    def _padded(self, inputs: dict[str, Any]) -> Any:
        self.before_tokens = _without_last
        self.over_shared = _as_it_is
        # Images have positions of their own, in several dimensions.
        if self.method.positions and set(inputs) <= TEXT_ARGUMENTS:
            inputs["position_ids"] = positions_of(inputs["attention_mask"])
        self.sizes = inputs["input_ids"].numel(), int((inputs["labels"] != IGNORED).sum())
        return self.model(**inputs)

    def _trimmed(self, inputs: dict[str, Any]) -> Any:
        # With padding on the right only, positions are a row's own, and no causal model has seen padding.
        mask = inputs["attention_mask"]
        order = mask.argsort(dim=1, descending=True, stable=True)[:, : max(1, int(mask.sum(dim=1).max()))]
        rows = {name: value.gather(1, order) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        output = self._padded(rows)
        place = partial(_at_columns, columns=order, length=mask.shape[1])
        self.before_tokens = lambda hidden: place(hidden[:, :-1])
        return _each_row(output, place)


def positions_of(mask: Tensor) -> Tensor:
    """``(B, L)`` place of each token in its row, 0 on padding to its left."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def _router_loss(original: Callable[..., Any], copies: Tensor, *args: Any) -> Any:
    """TRL's call of the load-balancing loss, whose last argument weighs tokens: it is the mask of padded rows."""
    # Where nothing is scored, one token stands in for all, and its loss is a differentiable 0.
    return original(*args[:-1], copies.clamp(min=0 if copies.any() else 1)) * copies.any()


def _as_it_is(values: Tensor) -> Tensor:
    return values


def _without_last(hidden: Tensor) -> Tensor:
    return hidden[:, :-1]


def _at_columns(values: Tensor, columns: Tensor, length: int) -> Tensor:
    """``(B, l - 1, ...)`` before each token but the first -> ``(B, length - 1, ...)``, the tokens at their `columns`,
    ``(B, l)``; what learnt prompts put before them is left out."""
    wanted = values[:, 1 - columns.shape[1] :] if columns.shape[1] > 1 else values[:, :0]
    places = columns[:, 1:].reshape(*wanted.shape[:2], *[1] * (wanted.ndim - 2)).expand(wanted.shape)
    return wanted.new_zeros(wanted.shape[0], length, *wanted.shape[2:]).scatter(1, places, wanted)[:, 1:]


def _each_row(output: Any, unpack: Callable[[Tensor], Tensor]) -> Any:
    """The output with each score of a token put where TRL looks for it."""
    for name in ("log_probs", "entropy", "log_sum_sq_probs"):
        value = getattr(output, name)
        if value is not None:
            setattr(output, name, unpack(value))
    return output


def joined_rows(batches: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The tensors of micro-batches that have rows, with those of all; of anything else all have the same."""
    names = [name for name, value in batches[0].items() if isinstance(value, Tensor) and value.ndim]
    return {name: torch.cat([batch[name] for batch in batches]) for name in names}


def reordered(batches: Sequence[dict[str, Any]], window: int, shared: bool) -> list[dict[str, Any]]:
    """A rank's micro-batches with rows moved within each optimizer step's window: about as many tokens in each.

    Args:
        batches: of one generation batch, in the order of training, with as many rows each.
        window: micro-batches of one optimizer step; it divides their number.
        shared: whether rows with the same prompt are to come together.
    """
    found: list[dict[str, Any]] = []
    for begin in range(0, len(batches), window):
        chosen = batches[begin : begin + window]
        whole = joined_rows(chosen)
        lengths = (whole["prompt_mask"].sum(1) + whole["completion_mask"].sum(1)).tolist()
        prompts = [tuple(row) for row in whole["prompt_ids"].tolist()]
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        groups = [numbers[prompt] for prompt in prompts] if shared else range(len(prompts))
        order = torch.tensor(window_order(lengths, groups, len(chosen)))
        for rows in order.chunk(len(chosen)):
            moved = {name: value[rows.to(value.device)] for name, value in whole.items()}
            found.append({**chosen[0], **moved})
    return found
