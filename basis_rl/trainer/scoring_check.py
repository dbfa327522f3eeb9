"""How a model's rollouts are scored, asked of the model itself at the start: no list knows what somebody brings.

The log-probabilities that a step would use are compared with those of the model's own forward pass of one row alone.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedModel

from basis_rl.engine.local import in_mode
from basis_rl.run.seams import attributes
from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.packing import IGNORED, Method, Scorer
from basis_rl.trainer.random_numbers import random_numbers_kept

# Tokens of the prompts and of the rollouts that are scored, and the window to which sliding windows are narrowed, so
# that short rows show them.
PROMPT, ROLLOUTS, WINDOW = 40, (24, 9, 16), 6
# What a model may raise whose forward pass has no place for packed rows.
_NO_PLACE = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError, KeyError)

Rows = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Precision:
    """How exactly a model is asked.

    Attributes:
        context: within which it scores, such as autocast.
        rounding: greatest mean difference of log-probabilities, in nats a token, that counts as rounding there.
    """

    context: Callable[[], AbstractContextManager[Any]]
    rounding: float

    @staticmethod
    def of(dtype: torch.dtype, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Precision:
        """That of matrices multiplied in `dtype`. In 16 bits a mixture of experts may send a token elsewhere."""
        try:
            exact = dtype.itemsize > 2 and torch.get_float32_matmul_precision() == "highest"
        except RuntimeError:
            # transformers has set TF32 by torch's other functions, and torch does not answer then.
            exact = False
        return Precision(context, 1e-4 if exact else 0.2)


def settled(
    model: Any,
    method: Method,
    args: BasisConfig,
    prompts: Sequence[Sequence[int]],
    precisions: Sequence[Precision],
    longest: int | None = None,
    whole: bool = True,
) -> Method:
    """`method`, or the nearest to it by which the log-probabilities are those of rows alone. Collective if `model` is.

    Args:
        model: the policy, which may be wrapped; its method was told by `basis_rl.trainer.packing.enable_packing`.
        method: to begin with: then without shared prefixes, then with padding.
        args: the size of a micro-batch, whether packing is wanted, and the sampling temperature.
        prompts: tokens of one or two prompts of the run.
        precisions: in which it is asked: the step's own, and a more exact one if there is.
        longest: tokens of the longest row; None where it is not known.
        whole: whether rows alone are scored by the model's own forward pass. A sharded model scores them by TRL's fused
            head, since DeepSpeed would expect the module of its own head in later passes too.

    Raises:
        ValueError: none of them gives these log-probabilities; says by how much they differ.
    """
    name = type(getattr(model, "module", model)).__name__
    config: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel)).config
    # A tokenizer may know more tokens than the model has embeddings.
    known = [[token % config.get_text_config().vocab_size for token in ids] for ids in prompts]
    evaluated = args.per_device_eval_batch_size if args.eval_strategy != "no" else 0
    count = min(len(ROLLOUTS), max(rows_together(args), evaluated))
    rows = asked_rows(known, count, longest or PROMPT + max(ROLLOUTS), next(model.parameters()).device)
    temperature = args.temperature if whole else None
    told: list[str] = []
    with torch.no_grad(), in_mode(model, training=False), _narrow_windows(model, config, longest), _stirred(model):
        for each in _nearest_first(method):
            try:
                off, right = _differences(model, each, rows, precisions, temperature)
            except _NO_PLACE as error:
                if not each.packed:
                    raise ValueError(f"{name} cannot be scored with TRL's fused head: {error}") from error
                told.append(f"its attention cannot be told where a rollout begins ({error})"[:200])
                continue
            if right:
                return replace(each, reason=told[-1]) if told else each
            told.append(f"packed, a token's log-probability differs from that of its row alone by {off:.2g} on average")
        first = rows[0][:1], rows[1][:1], rows[2][:1]
        _, right = _differences(model, each, first, precisions, temperature)
    raise ValueError(_refusal(name, off, right, args))


def rows_together(args: BasisConfig) -> int:
    """Rows of a micro-batch; a budget of tokens puts as many together as it has room for."""
    return args.per_device_train_batch_size if args.per_device_token_budget is None else len(ROLLOUTS)


def agreed(find: Callable[[], Method]) -> Method:
    """What `find` finds, the same on every rank: the most careful method, or the first ValueError. Collective."""
    method: Method | None = None
    error = ""
    try:
        method = find()
    except ValueError as raised:
        error = str(raised)
    of_all = gather_object([(method, error)])
    for _, each in of_all:
        if each:
            raise ValueError(each)
    found: list[Method] = [each for each, _ in of_all]
    return min(found, key=lambda each: (each.packed, each.shared))


def _refusal(name: str, off: float, alone: bool, args: BasisConfig) -> str:
    begin = f"Log-probabilities as the step computes them differ from those of {name}'s own forward pass by {off:.2g} "
    if not alone:
        return (
            f"{begin}nats a token on average, for a single row too: TRL's fused head is not this model's head, so it "
            "cannot be trained with it. Take another model, or another version of TRL or transformers."
        )
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    way = "Set packing to auto, which has no padding on the left, or score" if args.packing == "none" else "Score"
    return (
        f"{begin}nats a token on average where rows have padding: what is computed of a row depends on its neighbours. "
        f"{way} rows one by one: set per_device_train_batch_size and per_device_eval_batch_size to 1, and "
        f"gradient_accumulation_steps to {rows}."
    )


def packing_lines(method: Method, in_order: str) -> list[str]:
    """What a run says at its start of what it cannot do; `in_order`: why rows stay in TRL's order, or empty."""
    if not method.packed:
        return [f"Rollouts are scored with padding: {method.reason}."] if method.reason else []
    lines = []
    if method.reason:
        lines.append(f"Rollouts are packed, but what they share is computed for each of them: {method.reason}.")
    if in_order:
        lines.append(
            f"Rollouts are packed in TRL's order, so that micro-batches have unequal numbers of tokens: {in_order}."
        )
    return lines


def asked_rows(prompts: Sequence[Sequence[int]], count: int, longest: int, device: torch.device) -> Rows:
    """``(B, L)`` tokens, mask and scored tokens, padded as TRL pads: two rollouts of the first prompt, one of the
    last."""
    lengths = [min(length, longest // 2) for length in ROLLOUTS[:count]]
    least = min(PROMPT, longest - max(lengths))
    # Of different lengths, so that there is padding on both sides.
    begins = [(list(ids) * least)[-max(1, least - 3 * at) :] for at, ids in enumerate((prompts[0], prompts[-1]))]
    chosen = [begins[0], begins[0], begins[1]][:count]
    width = max(map(len, chosen))
    ids = torch.zeros(count, width + max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, length) in enumerate(zip(chosen, lengths, strict=True)):
        rollout = (2 * length * prompt[::-1])[row : row + length]
        first = width - len(prompt)
        ids[row, first : width + length] = torch.tensor(prompt + rollout)
        mask[row, first : width + length] = 1
    scored = mask.clone()
    scored[:, :width] = 0
    return ids.to(device), mask.to(device), scored.to(device)


def _nearest_first(method: Method) -> Iterator[Method]:
    yield method
    if method.packed:
        if method.shared:
            yield replace(method, shared=False)
        yield replace(method, packed=False, shared=False)


def _differences(
    model: Any, method: Method, rows: Rows, precisions: Sequence[Precision], temperature: float | None
) -> tuple[float, bool]:
    """Mean over the scored tokens of the absolute difference of log-probabilities, in the first precision in which it
    is above rounding, and whether there is none."""
    off = 0.0
    for precision in precisions:
        with precision.context():
            try:
                expected = [_alone(model, rows, row, temperature) for row in range(len(rows[0]))]
            except _NO_PLACE:
                # Such a kernel cannot be asked more exactly than the step, whose precision is the last one.
                if precision is precisions[-1]:
                    raise
                continue
            # Of a model that is broken, other checks tell.
            if not all(bool(each.isfinite().all()) for each in expected):
                continue
            off = _difference(model, method, rows, expected)
        if not off <= precision.rounding:
            return off, False
    return off, True


def _alone(model: Any, rows: Rows, row: int, temperature: float | None) -> Tensor:
    """``(l - 1,)`` log-probabilities of a row's tokens but the first, by the model's own forward pass of this row; with
    temperature None by TRL's fused head, which gives those that are scored."""
    kept = rows[1][row].bool()
    ids, mask, scored = (part[row, kept][None] for part in rows)
    if temperature is None:
        return _scored(model, Method(False, False, trimmed=True, positions=True), (ids, mask, scored))[0]
    logits = model(input_ids=ids, use_cache=False).logits[0, -ids.shape[1] : -1]
    log_probs = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(dim=-1)
    return log_probs.gather(1, ids[0, 1:, None])[:, 0]


def _scored(model: Any, method: Method, rows: Rows) -> Tensor:
    """``(B, L - 1)`` as a step computes it."""
    ids, mask, scored = rows
    labels = ids.masked_fill(scored == 0, IGNORED)
    found = Scorer(model, method)(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
    # With `packing: none`, learnt prompts put columns before the others.
    log_probs: Tensor = found[:, found.shape[1] - ids.shape[1] + 1 :]
    return log_probs


def _difference(model: Any, method: Method, rows: Rows, expected: Sequence[Tensor]) -> float:
    _, mask, scored = rows
    found = _scored(model, method, rows)
    off = []
    for row, right in enumerate(expected):
        columns = mask[row].nonzero()[1:, 0]
        wanted = scored[row, columns].bool()
        off.append((found[row, columns - 1] - right)[wanted].abs())
    return float(torch.cat(off).double().mean())


@contextmanager
def _narrow_windows(model: nn.Module, config: Any, longest: int | None) -> Iterator[None]:
    """Within it sliding windows that are shorter than the longest row are `WINDOW` tokens wide, so that short rows show
    them; in the configuration and in modules."""
    with ExitStack() as narrowed:
        for owner in (config, config.get_text_config(), *model.modules()):
            windows = {name: size for name, size in vars(owner).items() if "window" in name and type(size) is int}
            wide = [name for name, size in windows.items() if WINDOW < size < (longest or math.inf)]
            narrowed.enter_context(attributes(owner, **dict.fromkeys(wide, WINDOW)))
        yield


@contextmanager
def _stirred(model: nn.Module) -> Iterator[None]:
    """Within it trained matrices that are all 0, as half of a new adapter's are, hold random numbers: with zeros the
    adapter would change nothing, wherever it looks."""
    empty = [p for p in model.parameters() if p.requires_grad and p.ndim > 1 and p.numel() and not bool(p.any())]
    if empty:
        # The same on every rank.
        with random_numbers_kept(empty[0].device, seed=0):
            for parameter in empty:
                parameter.data.normal_(std=0.1)
    try:
        yield
    finally:
        for parameter in empty:
            parameter.data.zero_()


def check_positions(model: nn.Module, longest: int | None, batch_size: int) -> None:
    """Rotary frequencies of a row do not depend on its neighbours, up to `longest` tokens.

    Raises:
        ValueError: they follow the longest row of a batch (longrope), or also the batches before (dynamic NTK).
    """
    for name, module in model.named_modules():
        parameters = list(inspect.signature(type(module).forward).parameters)[1:]
        if longest is None or longest <= WINDOW or parameters[:2] != ["x", "position_ids"]:
            continue
        try:
            follows, remembers = _frequencies(module, longest, parameters)
        except _NO_PLACE:
            continue
        if follows and (remembers or batch_size > 1):
            within = getattr(getattr(module, "config", None), "max_position_embeddings", longest)
            way = "" if remembers else " or set per_device_train_batch_size to 1,"
            raise ValueError(
                f"The rotary frequencies of {name} change with the longest row of a batch (rows may have {longest} "
                "tokens), so that a rollout's log-probabilities would depend on its neighbours. Keep prompt and "
                f"max_completion_length within the length that the model was trained for,{way} or choose another "
                f"rope_type, such as yarn (the context is {within})."
            )


def _frequencies(module: nn.Module, longest: int, parameters: Sequence[str]) -> tuple[bool, bool]:
    """Whether positions look different beside more of them, and after a longer row has been seen."""
    device = next(module.buffers()).device
    config: Any = getattr(module, "config", None)
    kinds: list[dict[str, Any]] = [{}]
    if "layer_type" in parameters:
        kinds = [{"layer_type": kind} for kind in set(config.layer_types)]
    follows = remembers = False
    for kind in kinds:

        def told(of: nn.Module, length: int, kind: dict[str, Any] = kind) -> Tensor:
            places = torch.arange(length, device=device)[None]
            found: Tensor = of(torch.zeros(1, 1, device=device), places, **kind)[0]
            return found

        fresh = copy.deepcopy(module)
        short = told(fresh, WINDOW)
        whole = told(fresh, longest)
        almost = told(fresh, longest - 1)
        follows |= not torch.equal(short[..., :WINDOW, :], whole[..., :WINDOW, :])
        remembers |= not torch.equal(almost, told(copy.deepcopy(module), longest - 1))
    return follows, remembers
