"""The module of a baseline that learns: run on each rank's own rows, trained by gradients of all ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.integrations import deepspeed

from basis_rl.baselines import LearnedBaseline
from basis_rl.functional.packing import pack_rows
from basis_rl.run.seams import attributes
from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.packing import Method, enable_packing, has_dropout, positions_of
from basis_rl.trainer.random_numbers import random_numbers_kept
from basis_rl.trainer.scoring import HiddenStates
from basis_rl.types import RolloutBatch

NETWORK_FILE = "baseline_module.pt"


class Critic:
    """Predicts with a `LearnedBaseline`'s module, and trains it.

    A module that reads tokens, and is thus a model of its own, sees packed rows where it and its backbone can
    (`ValueModel`). Where ZeRO-3 or FSDP shards the policy, PyTorch's `fully_shard` shards such a module, since
    accelerate prepares only one DeepSpeed engine. Any other module is whole on every rank. Ranks start with the same
    weights and take the same steps by the same gradients, summed over all.

    Minibatch j of k takes the rows whose place in the global batch is j modulo k. So it has the same rows for any
    number of ranks, and rollouts of one prompt, which are neighbours, are in different ones. k is the number of
    optimizer steps that the policy takes in one pass over a generation batch.
    """

    def __init__(
        self, baseline: LearnedBaseline, policy: nn.Module, tokenizer: Any, args: BasisConfig, accelerator: Accelerator
    ) -> None:
        self.baseline = baseline
        self.args = args
        self.accelerator = accelerator
        self.hidden = HiddenStates(policy) if baseline.reads_hidden_states else None
        device = accelerator.device
        # The same weights on every rank, and the run's random numbers as they would be without a critic.
        # Without its configuration of DeepSpeed, transformers loads a model whole, under ZeRO-3 as well.
        with random_numbers_kept(device, args.seed), attributes(deepspeed, _hf_deepspeed_config_weak_ref=None):
            self.module = baseline.build_module(policy, tokenizer)
        self.method = _method_of(self.module, args, device)
        if self.method is not None and self.method.reason and accelerator.is_main_process:
            print(f"The critic's rows have padding: {self.method.reason}.", flush=True)
        self.sharded = self.hidden is None and policy_is_sharded(accelerator)
        enable: Any = getattr(self.module, "gradient_checkpointing_enable", None)
        if args.gradient_checkpointing and enable is not None:
            enable()
        if self.sharded:
            shard(self.module, accelerator)
        self.module.to(device)
        self.parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=baseline.learning.rate, weight_decay=0.0)
        self._kept: dict[int, dict[str, Tensor]] = {}

    def values(self, output: dict[str, Any], step: int) -> Tensor:
        """``(B, T)`` predictions for this rank's rows; their inputs are kept until the module has learned from them.

        Args:
            output: the generation batch as TRL has it.
            step: its number.
        """
        if self.hidden is not None:
            inputs = {"hidden_states": self.hidden.take(output)}
        else:
            inputs = {
                "input_ids": torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                "attention_mask": torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
            }
        tokens = output["completion_ids"].shape[1]
        with torch.no_grad():
            rows = torch.arange(len(output["completion_ids"]))
            chunks = rows.split(self.args.per_device_train_batch_size)
            found = torch.cat([self._predict(inputs, chunk, tokens) for chunk in chunks])
        self._kept[step] = {key: value.cpu() for key, value in inputs.items()}
        self._kept[step]["tokens"] = torch.tensor(tokens)
        return found

    def _predict(self, inputs: dict[str, Tensor], rows: Tensor, tokens: int) -> Tensor:
        device = self.accelerator.device
        chosen: dict[str, Any] = {key: value[rows.to(value.device)].to(device) for key, value in inputs.items()}
        if self.hidden is None:
            chosen |= {"tokens": tokens, **self._layout(chosen["input_ids"], chosen["attention_mask"], tokens)}
        with self.accelerator.autocast():
            predicted: Tensor = self.module(**chosen)
        return predicted.float()

    def _layout(self, ids: Tensor, mask: Tensor, tokens: int) -> dict[str, Any]:
        """What a value model is given besides rows and mask, ``(B, L)``; values are needed in the last `tokens`
        columns."""
        if self.method is None:
            return {}
        if not self.method.packed:
            return {"position_ids": positions_of(mask)} if self.method.positions else {}
        scored = mask.clone()
        scored[:, :-tokens] = 0
        return {"packing": pack_rows(ids, mask, scored, share=self.method.shared)}

    def learn(self, batch: RolloutBatch) -> dict[str, float]:
        """Train on a generation batch; metrics of it, the same on every rank."""
        inputs = self._kept.pop(batch.step)
        tokens = int(inputs.pop("tokens"))
        ranks = self.accelerator.num_processes
        parts, rest = divmod(self.args.steps_per_generation, self.args.gradient_accumulation_steps)
        # A part must have as many rows on every rank, or the ranks of a sharded module would wait forever.
        parts = 1 if rest else parts
        mine = len(batch.rewards) // ranks
        first = self.accelerator.process_index * mine
        places = torch.arange(first, first + mine)
        found: dict[str, list[float]] = {}
        for _ in range(self.baseline.learning.epochs):
            for part in range(parts):
                chosen = places[places % parts == part]
                for key, value in self._step(batch, inputs, chosen, first, tokens).items():
                    found.setdefault(key, []).append(value)
        means = {key: sum(values) / len(values) for key, values in found.items()}
        return {**means, "critic_learning_rate": self.baseline.learning.rate}

    def _step(
        self, batch: RolloutBatch, inputs: dict[str, Tensor], places: Tensor, first: int, tokens: int
    ) -> dict[str, float]:
        """One optimizer step on the rows at `places` of the global batch; a gradient that is not finite is dropped."""
        reduce = self.accelerator.reduce
        device = self.accelerator.device
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        for chunk in places.split(self.args.per_device_train_batch_size):
            predicted = self._predict(inputs, chunk - first, tokens)
            loss = self.baseline.loss(predicted, batch.take(chunk, tokens))
            counted = loss.counts.to(predicted.dtype)
            (loss.per_token * counted).sum().backward()
            for key, value in {"": counted, **loss.metrics}.items():
                sums[key] = sums.get(key, torch.zeros((), device=device)) + (value * counted).sum().double()
        names = list(sums)
        count, *totals = reduce(torch.stack([sums[name] for name in names]), reduction="sum").tolist()
        # No rank has a token that counts, so all of them return here.
        if count == 0:
            return {}
        for parameter in self.parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            # The backward pass has averaged it over ranks already.
            if self.sharded:
                parameter.grad = gradient * (self.accelerator.num_processes / count)
            else:
                parameter.grad = reduce(gradient, reduction="sum") / count
        limit = self.args.max_grad_norm or math.inf
        norm = float(whole_tensor(torch.nn.utils.clip_grad_norm_(self.parameters, limit)))
        # The norm is that of all ranks, so they decide alike.
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        metrics = {name: total / count for name, total in zip(names[1:], totals, strict=True)}
        return {**metrics, "critic_grad_norm": norm}

    def forget(self, step: int) -> None:
        """Drop what is kept of generation batches from `step` on."""
        self._kept = {kept: inputs for kept, inputs in self._kept.items() if kept < step}

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps of batches that are not learned from yet. `save` has weights and optimizer."""
        return {"kept": self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result."""
        self._kept = dict(state["kept"])

    def save(self, folder: str | Path) -> None:
        """Write weights and optimizer into a checkpoint folder, whole. Collective."""
        options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        module = states.get_model_state_dict(self.module, options=options)
        # An optimizer that has not taken a step would be given its state by one, which its later steps count.
        optimizer = None
        if self.optimizer.state:
            optimizer = states.get_optimizer_state_dict(self.module, self.optimizer, options=options)
        if self.accelerator.is_main_process:
            torch.save({"module": module, "optimizer": optimizer}, Path(folder) / NETWORK_FILE)

    def load(self, folder: str | Path) -> None:
        """Restore `save`'s result; learning rates stay those that the optimizer was built with."""
        content = torch.load(Path(folder) / NETWORK_FILE, weights_only=True, map_location="cpu")
        options = states.StateDictOptions(full_state_dict=True)
        states.set_model_state_dict(self.module, content["module"], options=options)
        if content["optimizer"] is None:
            return
        # A resumed run may have another learning rate, which is allowed.
        rates = [group["lr"] for group in self.optimizer.param_groups]
        states.set_optimizer_state_dict(self.module, self.optimizer, content["optimizer"], options=options)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _method_of(module: nn.Module, args: BasisConfig, device: torch.device) -> Method | None:
    """How a value model's rows are laid out; None for a module that takes no layout: a head, or your own."""
    backbone: Any = getattr(module, "backbone", None)
    taken = inspect.signature(module.forward).parameters
    if backbone is None or not {"packing", "position_ids"} <= set(taken):
        return None
    # Before it is on its device, where its kernels are, its modules are looked at.
    asked = next(backbone.parameters()).device.type == device.type
    return enable_packing(backbone, args, None if asked else has_dropout(backbone))


# The module over all ranks by PyTorch's `fully_shard` (FSDP2), beside a policy of any engine.


def policy_is_sharded(accelerator: Accelerator) -> bool:
    """Whether no rank holds all of the policy: ZeRO-3 or FSDP, on several ranks."""
    if accelerator.num_processes == 1:
        return False
    kind = accelerator.distributed_type
    zero3 = kind == DistributedType.DEEPSPEED and int(accelerator.state.deepspeed_plugin.zero_stage) == 3
    return zero3 or kind == DistributedType.FSDP


def shard(module: nn.Module, accelerator: Accelerator) -> None:
    """Leave each rank its part of every parameter. What is in a list of modules (layers) is gathered one at a time."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for part in list(module.modules()):
        if isinstance(part, nn.ModuleList):
            for layer in part:
                fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def whole_tensor(value: Tensor) -> Tensor:
    """The tensor itself, or gathered from all ranks. Collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value
