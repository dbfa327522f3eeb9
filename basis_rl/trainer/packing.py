"""Scoring of rollouts without padding: what TRL hands a model as padded rows goes through it as one row of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn

from basis_rl.functional.packing import pack_rows, window_order
from basis_rl.trainer.attention import attention_name, is_known, let_through_packed_rows
from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.head import compact_head

# TRL's label for a token that is not scored.
IGNORED = -100
# Layers whose tokens meet in attention only; others carry a state along the row, or cut it into chunks.
LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
# What TRL gives a text model; anything else belongs to images or to the router's loss.
TEXT_ARGUMENTS = {"input_ids", "attention_mask", "labels", "fused_lm_head"}


@dataclass(frozen=True)
class Method:
    """How a model's rows are scored.

    Attributes:
        packed: as one row without padding; else padded rows, without the columns in which all have padding.
        shared: prefixes that rows share are computed once.
        trimmed: whether padding that all rows have is cut off where they are not packed.
        positions: whether padded rows need explicit positions, as with learned position embeddings.
        reason: why rows are not packed; empty where they are or where the user has said so.
    """

    packed: bool
    shared: bool
    trimmed: bool
    positions: bool
    reason: str = ""

    def __str__(self) -> str:
        return ("shared" if self.shared else "packed") if self.packed else "padded"


def method_of(model: Any, args: BasisConfig) -> Method:
    """The method for `model`, before it is wrapped for training, by its configuration and `args`."""
    plain: Any = model.get_base_model() if is_peft_model(model) else model
    takes_positions = "position_ids" in inspect.signature(type(plain).forward).parameters
    prompts = any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values())
    says_positions = takes_positions and not prompts
    if args.packing == "none":
        # Rotary positions are relative: what padding shifts them by changes nothing but rounding.
        rotary = any("Rotary" in type(module).__name__ for module in plain.modules())
        return Method(False, False, trimmed=False, positions=says_positions and not rotary)
    reason = "its prompts are learnt (PEFT)" if prompts else _reason(plain, args, takes_positions)
    if reason:
        return Method(False, False, trimmed=True, positions=says_positions, reason=reason)
    # Rows that share a prefix would share its dropout as well.
    return Method(True, not has_dropout(plain), trimmed=True, positions=True)


def enable_packing(model: Any, args: BasisConfig) -> Method:
    """`method_of`'s result, with the attention of `model` ready for packed rows; the reference is like the policy."""
    method = method_of(model, args)
    if method.packed:
        let_through_packed_rows(model.get_base_model() if is_peft_model(model) else model)
    return method


def _reason(model: Any, args: BasisConfig, takes_positions: bool) -> str:
    """Why rows of `model` cannot be packed; empty if they can."""
    config = model.config.get_text_config()
    if config is not model.config:
        return "it reads images too"
    weight = args.router_aux_loss_coef
    weight = getattr(config, "router_aux_loss_coef", 0.0) if weight is None else weight
    if weight and hasattr(config, "output_router_logits"):
        return "its router has an auxiliary loss (router_aux_loss_coef), in which every row counts"
    # Next to attention, some layers mix a token with its neighbours in the row, which belong to another rollout.
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return "it has convolutions along the row"
    if not model._supports_attention_backend or not takes_positions:
        return "its attention cannot be told where a rollout begins"
    if not is_known(attention_name(model)):
        return f"segments are not known to the attention '{attention_name(model)}'"
    if args.torch_compile:
        return "torch_compile would compile anew for every length"
    if getattr(args, "parallelism_config", None) is not None:
        return "parallelism_config splits rows"
    return ""


def has_dropout(model: Any) -> bool:
    """Whether two passes over the same tokens differ in training."""
    config: Any = model.config.get_text_config()
    modules = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    return modules or (getattr(config, "attention_dropout", 0.0) or 0.0) > 0


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

    def __call__(self, **inputs: Any) -> Any:
        device = inputs["input_ids"].device
        text = set(inputs) <= TEXT_ARGUMENTS
        if self.method.packed and text:
            with compact_head(device):
                return self._packed(inputs["input_ids"], inputs["attention_mask"], inputs["labels"])
        if not self.method.trimmed or not text:
            return self._padded(inputs)
        with compact_head(device):
            return self._trimmed(inputs)

    def _packed(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:
        rows = pack_rows(ids, mask, labels != IGNORED, share=self.method.shared)
        output = self.model(**rows.model_inputs(ids), shift_labels=rows.labels(ids), fused_lm_head=True)
        self.before_tokens = rows.unpack
        return _each_row(output, rows.unpack)

    def _padded(self, inputs: dict[str, Any]) -> Any:
        self.before_tokens = _without_last
        # Images have positions of their own, in several dimensions.
        if self.method.positions and set(inputs) <= TEXT_ARGUMENTS | {"output_router_logits"}:
            inputs["position_ids"] = positions_of(inputs["attention_mask"])
        return self.model(**inputs)

    def _trimmed(self, inputs: dict[str, Any]) -> Any:
        columns = inputs["attention_mask"].any(dim=0).nonzero()[:, 0].tolist() or [0]
        first = columns[0]
        last = columns[-1] + 1
        length = inputs["input_ids"].shape[1]
        rows = {name: value[:, first:last] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        output = self._padded(rows)
        self.before_tokens = lambda hidden: _widened(hidden[:, :-1], first, length - last)
        return _each_row(output, partial(_widened, before=first, after=length - last))


def positions_of(mask: Tensor) -> Tensor:
    """``(B, L)`` place of each token in its row, 0 on padding to its left."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def _without_last(hidden: Tensor) -> Tensor:
    return hidden[:, :-1]


def _widened(values: Tensor, before: int, after: int) -> Tensor:
    """``(B, l, ...)`` with columns of 0 on both sides."""
    empty = [values.new_zeros(values.shape[0], count, *values.shape[2:]) for count in (before, after)]
    return torch.cat([empty[0], values, empty[1]], dim=1)


def _each_row(output: Any, unpack: Callable[[Tensor], Tensor]) -> Any:
    """The output with each score of a token put where TRL looks for it."""
    for name in ("log_probs", "entropy", "log_sum_sq_probs"):
        value = getattr(output, name)
        if value is not None:
            setattr(output, name, unpack(value))
    return output


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
        # Of a tensor without rows, and of anything else, all micro-batches have the same.
        names = [name for name, value in chosen[0].items() if isinstance(value, Tensor) and value.ndim]
        whole = {name: torch.cat([batch[name] for batch in chosen]) for name in names}
        lengths = (whole["prompt_mask"].sum(1) + whole["completion_mask"].sum(1)).tolist()
        prompts = [tuple(row) for row in whole["prompt_ids"].tolist()]
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        groups = [numbers[prompt] for prompt in prompts] if shared else range(len(prompts))
        order = torch.tensor(window_order(lengths, groups, len(chosen)))
        for rows in order.chunk(len(chosen)):
            moved = {name: value[rows.to(value.device)] for name, value in whole.items()}
            found.append({**chosen[0], **moved})
    return found
