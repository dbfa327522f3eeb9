"""A module over all ranks by PyTorch's `fully_shard` (FSDP2), beside a policy of any engine."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map


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


def whole(tree: Any) -> Any:
    """The same with every sharded tensor gathered, on the CPU. Collective."""
    return tree_map(lambda x: whole_tensor(x).cpu() if isinstance(x, Tensor) else x, tree)


def whole_tensor(value: Tensor) -> Tensor:
    """The tensor itself, or gathered from all ranks. Collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def part_like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor as `parameter` is kept on this rank: sharded like it if it has its shape, else as it is."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def load_module(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Restore the whole tensors of a module's `state_dict`."""
    own = module.state_dict()
    module.load_state_dict({key: part_like(value, own[key]) for key, value in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore the whole tensors of an optimizer's `state_dict`; learning rates stay those that it was built with."""
    # A resumed run may have another learning rate, which is allowed.
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parts = {
        index: {key: part_like(value, parameters[index]) for key, value in entry.items()}
        for index, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": parts})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
