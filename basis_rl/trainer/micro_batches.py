"""Micro-batches by tokens: rows of an optimizer step are exchanged between ranks and cut by a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from basis_rl.functional.balance import Row, divide
from basis_rl.objectives import AnyObjective
from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.loss import Inputs, depending_on_micro_batches
from basis_rl.trainer.packing import Method, joined_rows

# What stands where a tensor has no row and no token, if not 0: a weight, of which losses take the logarithm, and the
# number of a row that is not one.
FILL = {"importance_sampling_ratio": 1, "global_row": -1}


def check_token_budget(
    args: BasisConfig, objective: AnyObjective, method: Method | None = None, others: Sequence[str] = ()
) -> None:
    """Raise ValueError if there is a budget, and padding or a result that depends on which rows it puts together.

    Args:
        args, objective: the run's.
        method: how rows are scored, once that is known.
        others: what else the run has that goes by rows.
    """
    found = [*depending_on_micro_batches(args, objective), *others]
    found += ["log_gradient_variance"] * args.log_gradient_variance
    if args.packing == "none":
        found.append("packing none")
    elif method is not None and not method.packed:
        found.append(f"rollouts that are scored with padding ({method.reason})")
    if args.per_device_token_budget is not None and found:
        raise ValueError(
            "per_device_token_budget forms micro-batches by length, without padding, and the result must not depend on "
            f"which rollouts share one. It does not work with {', '.join(found)}. Leave the budget out, or change that;"
            " per_device_train_batch_size sets micro-batches by rows."
        )


def by_tokens(
    accelerator: Accelerator, batches: Sequence[Inputs], window: int, budget: int, shared: bool
) -> list[list[Inputs]]:
    """The rows of all ranks, exchanged between them within each optimizer step, as micro-batches of few tokens.

    The loss of a micro-batch is multiplied by its ``row_weight`` where it is a mean over rows. ``real_rows`` of its
    rows come first; the others have no token and make it as long as those of the other ranks, since TRL gathers
    metrics of rows. Collective.

    Args:
        accelerator: exchanges rows.
        batches: this rank's of one generation batch, in the order of training, with B rows each.
        window: how many of them belong to one optimizer step; it divides their number.
        budget: tokens of a micro-batch, unless a single row has more.
        shared: whether a prompt is computed once for its rows.

    Returns:
        For each of `batches` those that are trained in its place; for some there may be none, never for the last one
        of a window.
    """
    slots: list[list[Inputs]] = []
    for begin in range(0, len(batches), window):
        parts = _of_window(accelerator, batches[begin : begin + window], budget, shared)
        slots += [parts[at * len(parts) // window : (at + 1) * len(parts) // window] for at in range(window)]
    return slots


def _of_window(accelerator: Accelerator, batches: Sequence[Inputs], budget: int, shared: bool) -> list[Inputs]:
    whole = joined_rows(batches)
    layout = divide(_rows(whole, shared), accelerator.num_processes, budget)
    mine = layout[accelerator.process_index]
    # A mean over these rows becomes their share of a mean over all B rows of each micro-batch of TRL's.
    lengths = [max(1, *map(len, parts)) for parts in zip(*layout, strict=True)]
    size = len(batches[0]["completion_ids"])
    found = [
        {**batches[0], "real_rows": len(rows), "row_weight": length / size}
        for rows, length in zip(mine, lengths, strict=True)
    ]
    for name, value in whole.items():
        # One tensor at a time: all rows of all ranks are a lot of memory.
        of_all = _of_all_ranks(accelerator, name, value)
        for part, rows, length in zip(found, mine, lengths, strict=True):
            part[name] = of_all.new_full((length, *of_all.shape[1:]), FILL.get(name, 0))
            part[name][: len(rows)] = of_all[torch.tensor(rows, dtype=torch.long, device=of_all.device)]
    return found


def _of_all_ranks(accelerator: Accelerator, name: str, value: Tensor) -> Tensor:
    """Rows of all ranks, as wide as the widest: prompts have their padding on the left."""
    padding: dict[str, Any] = {"pad_index": FILL.get(name, 0), "pad_first": name.startswith("prompt")}
    gathered: Tensor = accelerator.gather(accelerator.pad_across_processes(value, dim=1, **padding))
    return gathered


def _rows(whole: Inputs, shared: bool) -> list[Row]:
    """What each row of all ranks costs."""
    prompts = zip(whole["prompt_ids"].cpu(), whole["prompt_mask"].cpu().bool(), strict=True)
    mine = [ids[mask].numpy().tobytes() for ids, mask in prompts]
    counts = [whole[f"{kind}_mask"].sum(1).tolist() for kind in ("prompt", "completion")]
    numbers: dict[bytes | int, int] = {}
    rows = []
    for number, (prompt, before, after) in enumerate(gather_object(list(zip(mine, *counts, strict=True)))):
        group = numbers.setdefault(prompt if shared and after else number, len(numbers))
        # Of a prompt the last token belongs to each row, and a row that was cut off is not computed.
        rows.append(Row(group, before - 1, after + 1) if after else Row(group, 0, 0))
    return rows


def rows_within(accelerator: Accelerator, mask: Tensor, budget: int) -> int:
    """How many rows of any rank, whose tokens `mask` ``(B, L)`` shows, are within the budget. Collective."""
    longest = accelerator.gather(mask.sum(dim=1).max()[None]).max()
    return max(1, budget // int(longest))


def parts_of(batches: Iterable[Any]) -> list[Inputs]:
    """The micro-batches of a generation batch: each entry is one, or with a budget a list of them."""
    return [part for each in batches for part in (each if isinstance(each, list) else [each])]
