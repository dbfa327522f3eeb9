"""Called by `test_token_budget.py` on one or two ranks: the same rollouts with fixed rows and with budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file

from basis_rl.baselines import BatchMean
from basis_rl.objectives import OBJECTIVES
from tests.support.tiny import sums, tiny_trainer
from tests.trainer.sharded import OnCpus

ROWS = 24
OWN = [name for name, found in OBJECTIVES.items() if name != "bnpo" and not getattr(found, "by_micro_batch", False)]


class Ragged(OnCpus):
    """Completions by global row, a few of the last rank much longer; keeps what the passes and steps did."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sizes: list[tuple[int, int]] = []  # tokens and rows of each pass
        self.scored: list[int] = []  # tokens of each pass without gradient
        self.trained: list[list[tuple[int, ...]]] = [[]]  # rollouts by optimizer step
        self.synced: list[list[bool]] = [[]]  # whether each pass of a step would average gradients
        self.gradients: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)
        self.model.register_forward_pre_hook(self.noted, with_kwargs=True)

    def noted(self, model, args, kwargs):
        tokens = kwargs["input_ids"].shape[1]
        if self._in_loss is None:
            self.scored.append(tokens)
            return
        (inputs,) = self._in_loss[:1]
        real = inputs["completion_ids"][: inputs.get("real_rows")], inputs["completion_mask"].bool()
        self.trained[-1] += [tuple(ids[mask].tolist()) for ids, mask in zip(*real, strict=False)]
        self.sizes.append((tokens, len(real[0])))
        self.synced[-1].append(getattr(self.model_wrapped, "require_backward_grad_sync", True))

    def _generate_single_turn(self, prompt_ids, images, multimodal, num_generations, **kwargs):
        rank, number = self.accelerator.process_index, self._generation_batch
        rows = range(rank * len(prompt_ids), (rank + 1) * len(prompt_ids))
        lengths = [
            1 + row * row * (5 + number) % 11 + (45 if row >= ROWS // 2 and row % 6 in (4, 5) else 0) for row in rows
        ]
        found = [
            [20 + (row * 7 + 3 * k * k + number) % 50 for k in range(n)] for row, n in zip(rows, lengths, strict=True)
        ]
        return [[*ids, self._tokenizer.eos_token_id] for ids in found], None

    def _get_grad_norm(self, model, *args, **kwargs):
        if all(type(p.grad) is torch.Tensor for p in model.parameters()):
            self.gradients.append(flat64(p.grad for p in model.parameters()))
        self.trained.append([])
        self.synced.append([])
        return super()._get_grad_norm(model, *args, **kwargs)


def flat64(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def run(folder: Path | str, ranks: int, budget: int | None, model: str, **given: Any) -> Any:
    """A trained trainer: two optimizer steps of each generation batch, in float64."""
    shape = {"per_device_train_batch_size": ROWS // 4 // ranks, "gradient_accumulation_steps": 2}
    shape |= {"steps_per_generation": 4, "max_steps": 3, "max_completion_length": 64, "max_grad_norm": 0.0}
    shape |= {"optim": "sgd", "learning_rate": 0.5, "per_device_token_budget": budget}
    start = given.pop("start", None)
    baseline = given.pop("baseline", "rloo" if given.get("num_generations", 4) > 1 else "batch_mean")
    own = {"train_dataset": sums(ROWS), "model": model, "model_init_kwargs": {"dtype": torch.float64}}
    trainer = tiny_trainer(folder, baseline, Ragged, **{**shape, **own, **given})
    assert trainer.accelerator.num_processes == ranks
    trainer.train(resume_from_checkpoint=start)
    return trainer


def found_by(trainer: Any) -> dict[str, Any]:
    """What all ranks have done, and what is logged."""
    told = ("loss", "grad_norm", "entropy", "kl", "clip_ratio/", "cispo_clip_ratio", "vespo/")
    return {
        "gradients": trainer.gradients,
        "mine": [Counter(rows) for rows in trainer.trained[:-1]],
        "trained": [Counter(gather_object(rows)) for rows in trainer.trained[:-1]],
        "sizes": trainer.sizes,
        "scored": trainer.scored,
        "synced": trainer.synced,
        "logs": [
            {key: value for key, value in row.items() if key.startswith(told)}
            for row in trainer.state.log_history
            if "loss" in row
        ],
        "type": str(trainer.accelerator.distributed_type),
        "moments": getattr(getattr(trainer.baseline, "optimal", None), "moments", None),
    }


# By name the settings of a run; `budgets` are those it is run with.
CASES: dict[str, dict[str, Any]] = {
    **{f"{name}, groups": {"objective": name, "num_iterations": 2} for name in OWN},
    "luspo, single": {"objective": "luspo", "num_iterations": 2, "num_generations": 1},
    "gspo_token, single": {"objective": "gspo_token", "num_iterations": 2, "num_generations": 1},
    "one step of a batch": {"objective": "grpo", "steps_per_generation": 2},
    "two batches in a step": {"objective": "dapo", "steps_per_generation": 1, "num_generations": 2},
    "out of step": {"objective": "grpo", "gradient_accumulation_steps": 3, "steps_per_generation": 2, "max_steps": 4},
    "sharded": {"objective": "grpo", "model_init_kwargs": {"dtype": "float32"}},
    "checkpointing": {"objective": "grpo", "gradient_checkpointing": True},
    "KL of TRL": {"objective": "grpo", "beta": 0.5, "num_iterations": 2},
    "KL of ours": {"objective": "sapo", "beta": 0.5, "num_iterations": 2, "kl_estimator": "k2"},
    "KL of ours over tokens": {"objective": "gpg", "beta": 0.5, "num_iterations": 2, "kl_estimator": "k2"},
    "a target": {"objective": "grpo", "max_steps": 4},
    "cut off": {"objective": "grpo", "mask_truncated_completions": True, "max_completion_length": 30},
}
# One rollout has more tokens than the first; to the last, all of a step are one micro-batch.
BUDGETS = (60, 200, 10**6)


def resumed(folder: Path, ranks: int, model: str) -> list[torch.Tensor]:
    """The weights in the middle of a generation batch, after the step that follows, and after it once more."""
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 4, "model_init_kwargs": {"dtype": "float32"}}
    whole = run(folder / "whole", ranks, 60, model, **saving)
    checkpoint = folder / "whole" / "checkpoint-3"
    again = run(folder / "again", ranks, 60, model, start=str(checkpoint), **saving)
    start = load_file(checkpoint / "model.safetensors")
    return [
        flat64(weights[name] for name in start)
        for weights in (start, whole.model.state_dict(), again.model.state_dict())
    ]


def main(folder: Path, ranks: int, model: str, names: list[str], budgets: Sequence[int] = BUDGETS) -> dict[Any, Any]:
    """What the runs with each budget and without one have done, by name and budget."""
    results = {}
    for name in names:
        if name == "resumed":
            results[name] = resumed(folder, ranks, model)
            continue
        for budget in (None, *budgets):
            case = dict(CASES[name])
            if name == "a target":
                case["baseline"] = BatchMean("optimal_token")
            results[name, budget] = found_by(run(folder / f"{name}-{budget}", ranks, budget, model, **case))
    return results
