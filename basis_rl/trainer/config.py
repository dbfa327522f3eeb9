"""`BasisConfig`: TRL's `GRPOConfig`, with one rollout per prompt allowed, and the named objectives."""

from __future__ import annotations

import copy
import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from trl import GRPOConfig

from basis_rl.functional.kl import ESTIMATORS
from basis_rl.hub.redact import redact
from basis_rl.names import option
from basis_rl.objectives import AnyObjective, Objective, TrlObjective, build_objective, objective_name
from basis_rl.trainer.builds import break_abandoned_locks


class _One(int):
    """The integer 1, as `GRPOConfig` sees it: it refuses ``num_generations < 2``, which is the baseline's to decide."""

    def __lt__(self, other: Any) -> bool:
        return False


@dataclass
class BasisConfig(GRPOConfig):
    """Settings of a run: all of TRL's `GRPOConfig` (and so transformers' `TrainingArguments`), and these.

    ``num_generations`` may be 1 with a baseline that needs no group. What TRL reads for its own advantage
    (``scale_rewards``, ``multi_objective_aggregation``) belongs to the baseline here and must keep its default.

    Raises:
        ValueError: settings that contradict each other, from here or from TRL.
    """

    num_generations: int = option(8, "Rollouts per prompt; 1 with a baseline that needs no group.")
    kl_placement: str = option("loss", "Where the KL penalty (coefficient: beta) goes: 'loss' or 'reward'.")
    kl_estimator: str | None = option(
        None, "k1, k2 or k3; default k3 in the loss (TRL's), k1 in the reward. No k1 loss."
    )
    difficulty_column: str | None = option(None, "Column by whose values (at most 20) the reward is logged apart.")
    log_gradient_variance: bool = option(
        False, "Log total power, signal and variance of each step's gradient (data parallelism only)."
    )
    vllm_weight_sync: str = option(
        "auto", "How weights get to a vLLM server: 'nccl', 'folder' (shared memory), or by the device."
    )
    vllm_sync_folder: str | None = option(
        None, "Folder for weight_sync 'folder', seen by both sides; default: shared memory."
    )
    vllm_sync_tolerance: float | None = option(
        None, "Largest log-probability error of vLLM after a sync; default: 1e-3 in fp32, else 1."
    )
    vllm_request_timeout: float = option(1800.0, "Seconds that one request to the vLLM server may take.")
    vllm_recovery_timeout: float = option(
        600.0, "Seconds to wait for a vLLM server that failed, before training stops."
    )
    async_prefetch: bool = option(
        False,
        "Generate the next batch on the vLLM server while training on this one: rollouts are one batch "
        "old, which their importance weights correct.",
    )
    max_tool_calling_iterations: int | None = option(
        10, "With tools: how often a rollout's calls are answered, so turns less one."
    )
    filter_void_turns: bool = option(
        False, "With tools: no loss on rollouts with a turn that neither calls a tool nor boxes an answer."
    )
    max_nonfinite_steps: int = option(
        10, "Steps in a row without a finite gradient, each skipped, after which a run ends."
    )
    on_invalid_gold: str = option(
        "error", "What to do with problems whose gold does not verify against itself: 'error' or 'drop'."
    )
    hub_retries: int = option(4, "Times that a failed push to the Hub is repeated.")
    hub_retry_wait: float = option(5.0, "Seconds before the first repetition; doubled each time, at most 300.")
    model_license: str | None = option(
        None, "License of the trained model (`apache-2.0`), default: the base model's card."
    )

    def __post_init__(self) -> None:
        generations = self.num_generations
        if generations < 1:
            raise ValueError(f"num_generations must be at least 1, got {generations}.")
        if self.hub_retries < 0 or self.hub_retry_wait < 0:
            raise ValueError(
                f"hub_retries and hub_retry_wait must be at least 0, got {self.hub_retries}, {self.hub_retry_wait}."
            )
        if self.on_invalid_gold not in ("error", "drop"):
            raise ValueError(f"on_invalid_gold must be 'error' or 'drop', got '{self.on_invalid_gold}'.")
        if self.vllm_weight_sync not in ("auto", "nccl", "folder"):
            raise ValueError(f"vllm_weight_sync must be 'auto', 'nccl' or 'folder', got '{self.vllm_weight_sync}'.")
        if self.use_vllm and self.vllm_mode == "server":
            # While the first rank waits for the server, the others wait for it in a collective.
            patience = self.vllm_request_timeout + self.vllm_recovery_timeout + self.vllm_server_timeout + 300.0
            self.ddp_timeout: int = max(self.ddp_timeout, int(patience))
        self._check_kl()
        self._check_prefetch()
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if self.use_cpu and several and getattr(self, "ddp_backend", None) is None:
            self.ddp_backend = "gloo"  # transformers would ask for it; there is no other choice
        if self.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("true", "1", "yes"):
            break_abandoned_locks()  # DeepSpeed compiles in the next lines
        if generations == 1:
            self.num_generations = _One(1)
        try:
            super().__post_init__()
        finally:
            self.num_generations = generations
        if self.scale_rewards != "group":
            raise ValueError(
                f"scale_rewards='{self.scale_rewards}': the scale is the baseline's choice. For the group mean without "
                "the standard deviation take baseline='dr_grpo'."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"multi_objective_aggregation='{self.multi_objective_aggregation}' is an advantage estimator of its "
                "own, which no baseline can be put into. Leave it out; reward_weights weigh the reward functions."
            )

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, and secrets within dictionaries (`model_init_kwargs`) are left out too."""
        return {key: redact(value) if type(value) is dict else value for key, value in super().to_dict().items()}

    def _check_prefetch(self) -> None:
        if not self.async_prefetch:
            return
        if not (self.use_vllm and self.vllm_mode == "server"):
            raise ValueError("async_prefetch needs a vLLM server beside the training: use_vllm, vllm_mode 'server'.")
        if not self.vllm_importance_sampling_correction:
            raise ValueError(
                "async_prefetch trains on rollouts of the batch before's weights, which is right only with their "
                "importance weights. Leave vllm_importance_sampling_correction on, or async_prefetch off."
            )

    def _check_kl(self) -> None:
        if self.kl_placement not in ("loss", "reward"):
            raise ValueError(f"kl_placement must be 'loss' or 'reward', got '{self.kl_placement}'.")
        if self.kl_estimator is None:
            self.kl_estimator = "k3" if self.kl_placement == "loss" else "k1"
        if self.kl_estimator not in ESTIMATORS:
            raise ValueError(f"kl_estimator must be one of {', '.join(ESTIMATORS)}, got '{self.kl_estimator}'.")
        if self.kl_placement == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator='k1' as a loss has no pull towards the reference: its expected gradient is 0. Take k2 "
                "(the reverse KL) or k3, or kl_placement='reward'."
            )


def with_objective(args: BasisConfig, objective: str | AnyObjective | None) -> tuple[BasisConfig, AnyObjective]:
    """The objective as an object, and a copy of `args` that names its loss; None is the one that `args` names.

    Raises:
        ValueError: unknown name, or `args` already names another loss.
    """
    if objective is None:
        return args, TrlObjective(args.loss_type, args.importance_sampling_level)
    found = build_objective(objective)
    defaults = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    changed = copy.copy(args)
    for name in ("loss_type", "importance_sampling_level"):
        current, own = getattr(args, name), isinstance(found, Objective)
        value = defaults[name] if own else getattr(found, name)
        if current not in (defaults[name], value):
            means = "is no loss of TRL's" if own else f"means {name}='{value}'"
            raise ValueError(f"objective='{objective_name(found)}' {means}, but {name}='{current}' is set. Drop one.")
        setattr(changed, name, value)
    return changed, found
