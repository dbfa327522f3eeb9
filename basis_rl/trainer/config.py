"""`BasisConfig`: TRL's `GRPOConfig`, with one rollout per prompt allowed, and the named objectives."""

from __future__ import annotations

import copy
import dataclasses
import os
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

from torch.distributed import distributed_c10d
from trl import GRPOConfig

from basis_rl.engine.client import server_urls
from basis_rl.functional.objectives import BYPASS, ESTIMATORS, REJECTIONS
from basis_rl.functional.pacing import most_batches_ahead
from basis_rl.names import check_word, option, require_extra
from basis_rl.objectives import AnyObjective, Objective, TrlObjective, build_objective, objective_name
from basis_rl.run.redact import public_path, redact
from basis_rl.run.run_lock import break_abandoned_locks

CISPO_BOUND = 5.0
# The least values of settings.
_LEAST = {
    0: ("beta", "hub_retries", "hub_retry_wait", "keep_rollouts_mb", "max_staleness"),
    1: (
        "batches_in_flight",
        "generation_batch_size",
        "gradient_accumulation_steps",
        "max_completion_length",
        "max_tool_calling_iterations",
        "num_iterations",
        "per_device_token_budget",
        "per_device_train_batch_size",
        "steps_per_generation",
    ),
}
# The words that settings may have.
_WORDS = {
    "kl_placement": ("loss", "reward"),
    "on_invalid_gold": ("error", "drop"),
    "packing": ("auto", "none"),
    "rollouts": ("sync", "stream"),
    "vllm_importance_sampling_mode": (
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        *REJECTIONS,
        BYPASS,
    ),
    "vllm_lora_sync": ("merged", "adapter"),
    "vllm_weight_sync": ("auto", "nccl", "folder"),
}
# What TRL's messages about sizes leave open.
_OF_SIZES = (
    " generation_batch_size is per_device_train_batch_size x steps_per_generation (or gradient_accumulation_steps) x "
    "processes: change one of these, or num_generations."
)


class _One(int):
    """A 1 that is not less than 2: `GRPOConfig` refuses ``num_generations < 2``, but here the baseline decides that."""

    def __lt__(self, other: Any) -> bool:
        return False


@dataclass
class BasisConfig(GRPOConfig):
    """Settings of a run: all of TRL's `GRPOConfig` (and so transformers' `TrainingArguments`), and these.

    ``num_generations`` may be 1 with a baseline that needs no group. What TRL reads for its own advantage
    (``scale_rewards``, ``multi_objective_aggregation``) belongs to the baseline here: beside ``grpo``, the default,
    they name the baseline that computes the same (`basis_rl.trainer.plan.baseline_of_settings`).

    Raises:
        ValueError: settings that contradict each other, from here or from TRL.
    """

    num_generations: int = option(8, "The number of rollouts per prompt; 1 with a baseline that needs no group.")
    max_generations: int | None = option(
        None,
        "Divides the rollouts of a batch among its prompts by the belief about their values, at most so many for one, "
        "and num_generations on average: more for prompts that are neither solved nor impossible. The default gives "
        "each num_generations.",
    )
    kl_placement: str = option("loss", "Where the KL penalty (its coefficient is beta) goes: 'loss' or 'reward'.")
    kl_estimator: str | None = option(
        None,
        "k1, k2 or k3. In the reward the default is k1. In the loss k1 is refused, and the default is k3 times the "
        "policy's ratio, as in TRL (use_bias_correction_kl): on-policy it has the gradient of k2, except with the "
        "sequence ratios of gspo and luspo.",
    )
    packing: str = option(
        "auto",
        "auto scores rollouts without padding and common beginnings of rollouts only once, if the model allows it; "
        "none scores padded rows as TRL does.",
    )
    per_device_token_budget: int | None = option(
        None,
        "The tokens of a micro-batch, in place of per_device_train_batch_size rollouts; only a longer single rollout "
        "has more. Rollouts are exchanged between processes, so that each has about as many tokens in an optimizer "
        "step. A step has the same rollouts as without it.",
    )
    difficulty_column: str | None = option(
        None, "A column with at most 20 different values; the reward is logged for each of them."
    )
    log_gradient_variance: bool = option(
        False, "Logs total power, signal and variance of each step's gradient (data parallelism only)."
    )
    vllm_weight_sync: str = option(
        "auto", "How weights get to a vLLM server: 'nccl', 'folder' (shared memory), or 'auto', by the device."
    )
    vllm_sync_folder: str | None = option(
        None, "The folder for vllm_weight_sync 'folder', seen by both sides. The default is in shared memory."
    )
    vllm_lora_sync: str = option(
        "merged",
        "What a vLLM server gets of a LoRA policy: 'merged' weights, or the 'adapter' alone, through the folder. The "
        "server then needs --max-lora-rank.",
    )
    vllm_sync_tolerance: float | None = option(
        None, "The largest log-probability error of vLLM after a sync. The default is 1e-3 in float32, otherwise 1."
    )
    vllm_server_base_url: str | None = option(
        None,
        "The URL of a vLLM server, such as http://localhost:8000. Several, separated by commas, share the rollouts. "
        "The default is vllm_server_host and vllm_server_port.",
    )
    vllm_request_timeout: float = option(1800.0, "The seconds that one request to the vLLM server may take.")
    vllm_recovery_timeout: float = option(
        600.0, "The seconds to wait for a vLLM server that failed, before training stops."
    )
    vllm_importance_sampling_mode: str = option(
        "sequence_mask",
        "How rollouts are weighed by the ratio of the policy to the engine that sampled them. TRL's token_truncate, "
        "token_mask, sequence_truncate, sequence_mask bound the ratio of each token or of the rollout; seq_mean_k1, "
        "seq_mean_k3, seq_mask_tis reject rollouts by the mean of a statistic; bypass takes the engine's "
        "probabilities for those of the old policy, so there are no weights and no scoring pass.",
    )
    rollouts: str = option(
        "sync",
        "sync draws a batch of rollouts, then trains on it. stream lets a vLLM server draw rollouts all the time, each "
        "by itself, and trains as soon as a batch has ended; importance weights correct for the older policies.",
    )
    max_staleness: int = option(
        4,
        "With rollouts: stream: the most optimizer steps between the weights with which a rollout begins and those it "
        "trains. A step waits rather than to exceed it. 0 is the same as sync.",
    )
    batches_in_flight: int | None = option(
        None,
        "With rollouts: stream: how many generation batches are under way while one is trained on, which is how many "
        "batches old rollouts are on average. The default is 2, or what two optimizer steps use, within max_staleness.",
    )
    rollout_timeout: float = option(
        1800.0,
        "With rollouts: stream: the seconds that one rollout may take, with tools, environment and rewards. One that "
        "takes longer has no reward.",
    )
    max_tool_calling_iterations: int | None = option(
        10,
        "With tools: how many times the calls of a rollout are executed; one more turn follows. null means no limit, "
        "TRL's default.",
    )
    filter_void_turns: bool = option(
        False, "With tools: leaves rollouts out of the loss that have a turn without a call and without a box."
    )
    max_nonfinite_steps: int = option(
        10, "A run ends after this many steps in a row without a finite gradient. Each of them is skipped."
    )
    max_uniform_batches: int | None = option(
        None,
        "A run ends after this many generation batches in a row whose rewards are all equal or all missing. By default "
        "there is a warning.",
    )
    on_invalid_gold: str = option(
        "error", "What to do with problems whose gold does not verify against itself: 'error' or 'drop'."
    )
    overwrite_output_dir: bool = option(
        False,
        "Starts a new run in a folder with the checkpoints of an earlier run, and moves them into a folder previous-N.",
    )
    allow_changed_settings: bool = option(
        False, "Resumes even if settings have changed on which the order of the data or the saved state depends."
    )
    allow_truncated_sampling: bool = option(
        False,
        "Trains on rollouts drawn from another distribution than the policy's (top_p, top_k, penalties, biases, "
        "allowed or forbidden tokens), although the loss takes the policy's probabilities.",
    )
    keep_rollouts_mb: float = option(
        200.0,
        "The megabytes of rollouts that output_dir/rollouts keeps, compressed, for `basis-rl rollouts`. The oldest "
        "steps are deleted. 0 keeps none.",
    )
    push_rollouts: bool = option(False, "Pushes the rollouts that are kept to the Hub as well.")
    hub_retries: int = option(4, "How often a failed push to the Hub is repeated.")
    hub_retry_wait: float = option(5.0, "The seconds before the first repetition; they double each time, up to 300.")
    model_license: str | None = option(
        None, "The license of the trained model, such as apache-2.0. The default is that of the base model's card."
    )

    def __post_init__(self) -> None:
        generations = self.num_generations
        if generations < 1:
            raise ValueError(f"num_generations must be at least 1, got {generations}.")
        if self.max_generations is not None and self.max_generations <= generations:
            raise ValueError(
                f"max_generations ({self.max_generations}) must be above num_generations ({generations}), the "
                "average. Raise it, or leave it out: then every prompt has num_generations."
            )
        self._check_values()
        if self.use_vllm and self.vllm_mode == "server":
            # While the first rank waits for the server, the others wait for it in a collective, which must not time
            # out.
            patience = self.vllm_request_timeout + self.vllm_recovery_timeout + self.vllm_server_timeout + 300.0
            if self.streams:
                # A rollout may take its time twice: once until it has ended, and once more for its rewards.
                patience = max(patience, 2 * self.rollout_timeout + 300.0)
            self.ddp_timeout: int = max(self.ddp_timeout, int(patience))
        # transformers does not pass ddp_timeout on with `use_cpu`, and no library passes it to the groups of DeepSpeed
        # and FSDP.
        distributed_c10d.default_pg_timeout = timedelta(seconds=self.ddp_timeout)
        # transformers would read None as the checkpoint's own value, and -1 is what vLLM calls no limit.
        if self.top_k in (None, -1):
            self.top_k: int = 0
        self._check_kl()
        self._check_stream()
        if self.deepspeed:
            require_extra("deepspeed", "deepspeed")
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if self.use_cpu and several and getattr(self, "ddp_backend", None) is None:
            # transformers would ask for a backend, and this is the only one for CPUs.
            self.ddp_backend = "gloo"
        if self.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("true", "1", "yes"):
            # `super().__post_init__` makes DeepSpeed compile, which would wait for the lock of a process that was
            # killed.
            break_abandoned_locks()
        if generations == 1:
            self.num_generations = _One(1)
        try:
            super().__post_init__()
        except ValueError as error:
            hint = _OF_SIZES if "divisible" in str(error) else ""
            raise ValueError(f"{error}{hint}") from error
        finally:
            self.num_generations = generations
        self._check_pace()
        if not (self.bf16 or self.fp16) and self.mixed_precision != "no":
            raise ValueError(
                f"bf16 is false, but the configuration of accelerate has mixed_precision: {self.mixed_precision}. Set "
                f"{self.mixed_precision}: true, or give a configuration of your own with mixed_precision: 'no'."
            )

    def _check_values(self) -> None:
        if not self.rollout_timeout > 0:
            raise ValueError(f"rollout_timeout must be above 0 seconds, got {self.rollout_timeout:g}.")
        for bound, names in _LEAST.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and value < bound:
                    raise ValueError(f"{name} must be at least {bound}, got {value}.")
        for name, words in _WORDS.items():
            check_word(name, getattr(self, name), words)
        if self.vllm_lora_sync == "adapter" and not (self.use_vllm and self.vllm_mode == "server"):
            raise ValueError("vllm_lora_sync: adapter needs a vLLM server: use_vllm, vllm_mode 'server'.")
        several_servers = len(self.server_urls) > 1
        if several_servers and self.vllm_weight_sync == "nccl":
            raise ValueError(
                "vllm_server_base_url names several servers, which get weights through a folder that they all see, but "
                "vllm_weight_sync is 'nccl'. Set it to 'folder', or start one server with --data-parallel-size."
            )
        if several_servers and self.vllm_lora_sync == "adapter":
            raise ValueError(
                "vllm_lora_sync: adapter works with one server, but vllm_server_base_url names several. Set it to "
                "'merged', or name one server."
            )

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, without secrets, also within dictionaries (`model_init_kwargs`)."""
        return {
            key: plain_values(redact(value)) if type(value) is dict else value
            for key, value in super().to_dict().items()
        }

    @property
    def prompts_per_batch(self) -> int:
        """Prompts of a generation batch."""
        return self.generation_batch_size // self.num_generations

    @property
    def group_size(self) -> str:
        """Rollouts of a prompt in words: ``8``, or ``8 (at most 24)``."""
        most = "" if self.max_generations is None else f" (at most {self.max_generations})"
        return f"{self.num_generations}{most}"

    @property
    def server_urls(self) -> list[str]:
        """Of the vLLM servers that draw rollouts in server mode."""
        return server_urls(self.vllm_server_base_url, self.vllm_server_host, self.vllm_server_port)

    @property
    def streams(self) -> bool:
        """Whether rollouts are drawn while the policy is trained."""
        return self.rollouts == "stream" and self.max_staleness > 0

    def _check_stream(self) -> None:
        if not self.streams:
            return
        if not (self.use_vllm and self.vllm_mode == "server"):
            raise ValueError(
                "rollouts: stream needs a vLLM server, which draws rollouts while this process trains: set use_vllm, "
                "and vllm_mode to 'server'. transformers and vllm_mode 'colocate' draw and train in turns: set "
                "rollouts to 'sync' for them."
            )
        if self.vllm_lora_sync == "adapter":
            raise ValueError(
                "rollouts: stream works with merged weights only: vLLM 0.30 fails when it scores a probe, by which "
                "each sync is checked, beside requests with adapters. Leave vllm_lora_sync out."
            )
        if not self.vllm_importance_sampling_correction:
            raise ValueError(
                "rollouts: stream trains on rollouts that older weights sampled, which is right only with their "
                "importance weights. Leave vllm_importance_sampling_correction on, or set rollouts to sync."
            )

    def _check_pace(self) -> None:
        """The batches that are under way keep within ``max_staleness``."""
        if not self.streams:
            return
        served = self.steps_per_generation * self.num_iterations
        most = most_batches_ahead(self.max_staleness, served, self.gradient_accumulation_steps)
        if most < 1:
            needed = -(-served // self.gradient_accumulation_steps)
            raise ValueError(
                f"max_staleness ({self.max_staleness}) is less than the {needed} optimizer steps of a generation "
                f"batch, so nothing could be drawn ahead. Set max_staleness to {needed} or more, or rollouts to sync."
            )
        if self.batches_in_flight is not None and self.batches_in_flight > most:
            raise ValueError(
                f"batches_in_flight ({self.batches_in_flight}) is more than the {most} that max_staleness "
                f"({self.max_staleness}) allows. Lower it, or raise max_staleness."
            )
        two_steps = max(2, 2 * self.gradient_accumulation_steps // served)
        self.batches_in_flight = self.batches_in_flight or min(most, two_steps)

    def _check_kl(self) -> None:
        if self.kl_estimator is None:
            self.kl_estimator = "k3" if self.kl_placement == "loss" else "k1"
        check_word("kl_estimator", self.kl_estimator, ESTIMATORS)
        if self.kl_placement == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator='k1' as a loss has no pull towards the reference: its expected gradient is 0. Take k2 "
                "(the reverse KL) or k3, or kl_placement='reward'."
            )


def plain_values(value: Any) -> Any:
    """`value` in types that JSON and YAML have: torch's dtypes by name, objects by their ``to_dict`` or their text."""
    if isinstance(value, dict):
        return {key if type(key) in (int, str) else str(key): plain_values(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        # The order of a set is another one in each process.
        return [plain_values(entry) for entry in (sorted(value, key=str) if isinstance(value, set) else value)]
    if isinstance(value, Enum):
        return plain_values(value.value)
    if value is None or isinstance(value, bool):
        return value
    # numpy's numbers and texts are subclasses, which YAML does not know.
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return plain_values(redact(value.to_dict()))
    return str(value).removeprefix("torch.")


def changed_settings(args: BasisConfig, *, defaults: bool = False) -> dict[str, Any]:
    """The settings that differ from their defaults (or all, with `defaults`), as YAML has them and without secrets."""
    changed = {}
    for entry in dataclasses.fields(args):
        value = getattr(args, entry.name, None)
        plain = isinstance(value, (bool, int, float, str, list, dict)) and not entry.name.startswith("_")
        if plain and (defaults or value != _default(entry)):
            changed[entry.name] = value
    shown: dict[str, Any] = plain_values(redact(changed))
    return {
        key: public_path(value) if key.endswith("_dir") and type(value) is str else value
        for key, value in shown.items()
    }


def _default(entry: dataclasses.Field[Any]) -> Any:
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return None if entry.default is dataclasses.MISSING else entry.default


def without_secrets(args: BasisConfig) -> BasisConfig:
    """A copy of the arguments that may be saved and pushed: no token in it."""
    public = copy.copy(args)
    kept = redact(vars(args))
    plain = {key: kept.get(key) for key, value in vars(args).items() if type(value) in (str, dict)}
    public.__dict__.update(plain)
    return public


def with_objective(args: BasisConfig, objective: str | AnyObjective | None) -> tuple[BasisConfig, AnyObjective]:
    """The objective as an object, and a copy of `args` that names its loss; None is the one that `args` names.

    Raises:
        ValueError: unknown name, or `args` already names another loss.
    """
    if objective is None:
        return _with_clamp(args), TrlObjective(args.loss_type, args.importance_sampling_level)
    found = build_objective(objective)
    defaults = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    changed = copy.copy(args)
    for name in ("loss_type", "importance_sampling_level"):
        current = getattr(args, name)
        own = isinstance(found, Objective)
        value = defaults[name] if own else getattr(found, name)
        if current not in (defaults[name], value):
            means = "is not one of TRL's losses" if own else f"means {name}='{value}'"
            raise ValueError(f"objective='{objective_name(found)}' {means}, but {name}='{current}' is set. Drop one.")
        setattr(changed, name, value)
    return _with_clamp(changed), found


def _with_clamp(args: BasisConfig) -> BasisConfig:
    """Give ``cispo`` the bound that TRL recommends if there is none, where TRL itself would take `epsilon`, 0.2.

    Raises:
        ValueError: a bound below 1, at which the importance weights of all ratios near 1 would be clipped.
    """
    if args.loss_type != "cispo":
        return args
    if args.epsilon_high is None:
        args = copy.copy(args)
        args.epsilon_high = CISPO_BOUND
    if args.epsilon_high < 1:
        raise ValueError(
            f"objective='cispo' with epsilon_high={args.epsilon_high}: it bounds the ratio itself, not its distance to "
            f"1, so every importance weight would be {args.epsilon_high}. Leave epsilon_high out ({CISPO_BOUND:g}), or "
            "set it above 1."
        )
    return args
