"""`BasisTrainer`: TRL's `GRPOTrainer`, with the advantage taken from a baseline object.

A step, in the order in which TRL calls the methods that stand here in the same order:

- draw: `_generate_and_score_completions` asks the prompt sampler which rows the generation batch has;
- generate: `_generate`, turn by turn (`_generate_single_turn`, `_tool_call_loop`); with ``rollouts: stream`` what has
  ended comes from a stream (`_streamed_rows`), in place of these two and of the rewards;
- score: `_calculate_rewards`; the scoring pass keeps what else the baseline asks for (`SIGNALS`);
- estimate: `_advantages` gathers one `RolloutBatch` over all ranks and asks the baseline;
- loss: `compute_loss` of each micro-batch, with our own objective or KL term beside TRL's (`PolicyLoss`);
- update: `_get_grad_norm` skips steps without finite gradients;
- learn: `_learn`, once the policy has used up a generation batch, updates the baseline, the critic and the belief.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from itertools import islice, zip_longest
from operator import mul
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model, send_to_device
from datasets import Dataset
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from basis_rl.baselines import Baseline, LearnedBaseline
from basis_rl.data import problem_text
from basis_rl.data.prompts import IMAGES
from basis_rl.engine.local import StopStrings, declared_ends, generating_by
from basis_rl.engine.template_day import template_day, use_day
from basis_rl.functional.diagnostics import advantage_metrics, mean_by
from basis_rl.functional.gae import at_turn_ends
from basis_rl.functional.objectives import BYPASS, REJECTIONS, kl_estimate
from basis_rl.identity import played_id, row_id
from basis_rl.names import refuse_unknown, require_extra
from basis_rl.objectives import AnyObjective, LossInputs, objective_name
from basis_rl.report import plot_training
from basis_rl.run import checkpoint, errors
from basis_rl.run.disk import checkpoint_bytes, naming_a_full_disk
from basis_rl.run.peers import naming_lost_peers
from basis_rl.run.progress import newest_rows, use_progress_lines, whole_log
from basis_rl.run.ranks import gathered, on_main_process, require_same
from basis_rl.run.record import RunInfo
from basis_rl.run.rollouts import KeptRollouts
from basis_rl.run.run_lock import check_place, end_with_launcher, held
from basis_rl.run.seams import attributes
from basis_rl.run.terminal import guarded_output
from basis_rl.run.usage import Usage
from basis_rl.samplers import Draw, PromptSampler, ValueBelief
from basis_rl.trainer import correction, scoring
from basis_rl.trainer import state as run_state
from basis_rl.trainer.config import BasisConfig, without_secrets
from basis_rl.trainer.conversation import StreamedRollout
from basis_rl.trainer.critic import Critic, policy_is_sharded
from basis_rl.trainer.faults import FiniteGradients, GradientMonitor, StopOnSignal, check_weights
from basis_rl.trainer.first_rollouts import FirstRollouts, Rollout
from basis_rl.trainer.gather import gather_batch, gather_rows, local_rows, prompt_ids_of
from basis_rl.trainer.generation_check import generation_kwargs_of, require_tokens
from basis_rl.trainer.logs import (
    EvalScores,
    StepMeans,
    distinct,
    of_kind,
    per_rollout,
    rollout_rows,
    set_aside,
    without_infinities,
)
from basis_rl.trainer.loss import SILENT_LOSS_TYPE, PolicyLoss, depending_on_micro_batches, token_means
from basis_rl.trainer.micro_batches import by_tokens, check_token_budget, parts_of, rows_within
from basis_rl.trainer.model_check import (
    check_saved,
    check_trained,
    copy_reference,
    processor_of,
    refuse_sharded_reference,
    warn_of_rounding,
)
from basis_rl.trainer.packing import (
    ASKED,
    IGNORED,
    Scorer,
    draws_random_numbers,
    enable_packing,
    has_dropout,
    has_weights,
    method_of,
    reordered,
)
from basis_rl.trainer.plan import (
    Plan,
    check_token_advantages,
    check_with_model,
    first_prompts,
    longest_row,
    plan_run,
    reward_range_of,
    with_data,
)
from basis_rl.trainer.publish import Origin, Publisher, run_info
from basis_rl.trainer.random_numbers import OwnNumbers, random_numbers_kept
from basis_rl.trainer.rewarding import RewardGuard, UniformRewards, total_rewards
from basis_rl.trainer.scoring_check import Precision, agreed, check_positions, packing_lines, rows_together, settled
from basis_rl.trainer.selection import Coverage, EpochIndices, Resampling, Selection, rows_of_rank
from basis_rl.trainer.step_time import StepTimer, padding_metrics
from basis_rl.trainer.stream import Pace, Stream, StreamedBatches
from basis_rl.trainer.turns import Turns, count_turn, reading_calls
from basis_rl.types import Advantages, RolloutBatch, action_mask
from basis_rl.values.provenance import fingerprint, reward_code, weights_fingerprint

# Raised on every rank at once.
_FAILURES = (
    *(errors.ServerLost, errors.RequestRefused, errors.SyncError),
    *(errors.SelectionFailed, errors.RewardFailed, errors.NonFiniteGradients),
)


class BasisTrainer(GRPOTrainer):
    """PPO/GRPO training with a pluggable baseline, which turns the rewards of all ranks into advantages.

    ``metrics.jsonl`` and ``training.png`` in ``output_dir`` hold what was logged.

    Args:
        model: Hub id, path, or a loaded model, as in TRL.
        reward_funcs: one or several, as in TRL, or registered names (`basis_rl.rewards.registry.REWARDS`).
        args: a `BasisConfig`.
        train_dataset: a `Dataset` or a list of dictionaries, with the columns ``prompt`` (unless an
            `environment_factory` makes the prompts) and those that the reward functions read. Rows with the same
            ``prompt_id``, if there is this column, are one problem (default: `basis_rl.identity.row_id`). None, with
            an `environment_factory`, is `basis_rl.data.prompts.seed_rows`.
        eval_dataset: as in TRL, or a list of dictionaries.
        baseline: one of `basis_rl.baselines.BASELINES`. Everything that has a registered name may also be an object, or
            your own as ``module:name``.
        objective: one of `basis_rl.objectives.OBJECTIVES`; None leaves the loss to `args` (TRL's default is ``dapo``).
        prompt_sampler: one of `basis_rl.samplers.SAMPLERS`.
        plan: all of the above except for the model, and `kwargs`, checked already (`basis_rl.trainer.plan`).
        **kwargs: all other arguments of `GRPOTrainer`. `tools` may also be objects (`basis_rl.tools.PythonTool`).

    Raises:
        ValueError: before training starts, two of these do not fit together, such as baseline and group size.
    """

    _tag_names = ("trl", "basis-rl")
    # TRL sets these; mypy does not see it.
    rollout_func: Any
    reward_func_names: list[str]
    eos_token_ids: list[int]
    _guarded: list[Any]
    _buffered_inputs: Any
    _step: int
    _last_loaded_step: int

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: BasisConfig | None = None,
        train_dataset: Dataset | list[dict[str, Any]] | None = None,
        eval_dataset: Any = None,
        *,
        baseline: str | Baseline = "grpo",
        objective: str | AnyObjective | None = None,
        prompt_sampler: str | PromptSampler = "uniform",
        plan: Plan | None = None,
        **kwargs: Any,
    ) -> None:
        # A plan that is given was checked with the model's configuration as well, before its weights are loaded.
        checked = plan is not None
        arguments = [*signature(GRPOTrainer).parameters, *signature(BasisTrainer).parameters]
        refuse_unknown("BasisTrainer", kwargs, arguments)
        if plan is None:
            plan = plan_run(model, reward_funcs, args, baseline, objective, prompt_sampler, **kwargs)
            if isinstance(model, str):
                check_saved(model, plan.tokenizer)
            processor = plan.tokenizer or processor_of(model, plan.args)
            plan = with_data(plan, train_dataset, eval_dataset, processing_class=processor)
        args = plan.args
        self.baseline = plan.baseline
        self.objective = plan.objective
        self.sampler = plan.sampler
        self._reward_range = reward_range_of(plan)
        self.reads = plan.reads
        self.draws_problems = plan.draws_problems
        self.publisher = Publisher(args)
        # Grading processes start while the model is loaded.
        for reward in plan.reward_funcs:
            getattr(reward, "start", lambda: None)()
        with _vllm(args) if args.use_vllm else nullcontext():
            super().__init__(
                model, plan.reward_funcs or None, args, plan.train_dataset, plan.eval_dataset, **plan.kwargs
            )
        if args.use_vllm and args.vllm_mode == "colocate":
            # The engine, in this process, has seeded all generators by its rank alone. The ranks of one engine must
            # sample alike.
            set_seed(args.seed + args.process_index // args.vllm_tensor_parallel_size)
        # Functions of one name would share their metrics.
        self.reward_func_names = distinct(self.reward_func_names)
        check_trained(self.model)
        if self.ref_model is not None and not isinstance(model, str):
            copy_reference(self.accelerator, model, self.ref_model)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            refuse_sharded_reference(args)
        elif self.accelerator.is_main_process:
            # DeepSpeed and FSDP keep a float32 copy of the weights, so no update is rounded away there.
            warn_of_rounding(self.model, args.learning_rate)
        use_progress_lines(self, plot_training)
        self._check_model(plan, checked)
        self._build_parts()
        if args.use_vllm:
            self.vllm_generation.set_interrupt(self.stop_on_signal.interrupting)

    def _check_model(self, plan: Plan, checked: bool) -> None:
        """The plan's checks that need the model, unless they were made; what the model will be asked is kept."""
        known = {**plan.kwargs, "processing_class": self._tokenizer}
        # Those of environments come last, and the plan has them in its episodes.
        whole = replace(plan, reward_funcs=self.reward_funcs[: len(plan.reward_funcs)], kwargs=known)
        if not checked:
            # Before `_build_parts`, which asks the baseline's belief about the prompts.
            check_with_model(whole, self.model.config)
        self._asked_prompts = first_prompts(whole, 2)
        # A plan that was checked has rendered its prompts already.
        self._longest_row = longest_row(plan if checked else whole)
        check_positions(self.model, self._longest_row, rows_together(self.args))

    def _build_parts(self) -> None:
        """What `BasisTrainer` adds to TRL's trainer; each part is given what it needs."""
        args = self.args
        accelerator = self.accelerator
        self.origin = Origin.of(self.model.config, args, objective_name(self.objective))
        self.spending = Usage()
        self.was_finished = False
        self._generation_batch = 0
        self._pending = run_state.PendingBatches()
        # The checkpoint that the run began with.
        self._resumed: str | None = None
        # transformers would delete a checkpoint before the next one is complete, or the last one and keep the best.
        self._checkpoints_kept = args.save_total_limit
        # Micro-batches, generation batches, rollouts in use and usage after the last whole optimizer step.
        self._last_step: tuple[int, int, Any, tuple[int, int]] = (0, 0, None, (0, 0))
        self.stop_on_signal = StopOnSignal(accelerator)
        self.add_callback(_UpdateBaseline(self))
        self.add_callback(self.stop_on_signal)
        self._build_generation()
        self._build_scoring()
        self._build_selection()
        self._streamed = self._build_stream() if args.streams else None
        # Taken now, because training changes weights and parameters.
        self._base = self._base_now()
        self._settings = run_state.settings_of(self, self._base, self._tokenizer)
        require_same(run_state.shared_by_ranks(self, self._settings))

    def _base_now(self) -> dict[str, Any]:
        args = self.args
        role = "to which the adapter is added" if is_peft_model(self.model) else None
        if args.beta != 0.0 and not args.sync_ref_model:
            role = "from which the KL is measured"
        # Of a sharded model only the first rank has all weights.
        weights = weights_fingerprint(self.model) if self.accelerator.is_main_process else None
        # ZeRO-3 leaves empty tensors, with the full shape in an attribute.
        shapes = [(name, *getattr(weight, "ds_shape", weight.shape)) for name, weight in self.model.named_parameters()]
        return {**self.origin.base, "weights": weights, "shapes": fingerprint(str(shapes)), "role": role}

    def _build_generation(self) -> None:
        args = self.args
        self._numbers = OwnNumbers(self.accelerator.device)
        self._stop_strings: list[str] = []
        if (roll_out := self.rollout_func) is not None:
            self.rollout_func = lambda *given: _with_tokens(roll_out(*given))
        if args.use_vllm:
            self.eos_token_ids = [*self.eos_token_ids, *generation_kwargs_of(args).get("stop_token_ids", ())]
        else:
            # TRL must know every token at which `generate` ends a rollout, or the padding after it would have a loss.
            self.eos_token_ids = declared_ends(self.generation_config)
            strings = self.generation_config.stop_strings or []
            self._stop_strings = [strings] if isinstance(strings, str) else list(strings)
            # `StopStrings` takes their place, since TRL would take what `generate` puts after a string for output.
            self.generation_config.stop_strings = None
        self.turns = Turns(
            self.accelerator,
            self._tokenizer,
            args.max_completion_length,
            self._room,
            has_log_probs=args.use_vllm,
        )
        if args.use_vllm:
            self.vllm_generation.steps_taken = lambda: self.state.global_step
        # This rank's rollouts of the generation batch at hand, where a stream has brought them.
        self._served: list[StreamedRollout] | None = None
        # ``(N, F)`` of all ranks, where the batch at hand was scored when it was drawn.
        self._known_rewards: Tensor | None = None
        # Of this rank's rollouts, by function; empty for a batch that was resampled, whose turns have only their sums.
        self._turn_rewards: list[list[list[float]]] = []

    def _build_scoring(self) -> None:
        args = self.args
        accelerator = self.accelerator
        self._guard = RewardGuard(accelerator)
        self.reward_funcs = self.functions
        self._rewards_per_func: Tensor | None = None
        self._uniform = UniformRewards(args.max_uniform_batches)
        self._first = FirstRollouts(args.max_completion_length, self.functions)
        self._drawn: list[Rollout] = []
        # Prompts of the generation batch, where environments make them.
        self._begun: list[Any] = []
        self._kept_rollouts = KeptRollouts(str(args.output_dir), args.keep_rollouts_mb)
        self._eval_scores = EvalScores()
        self._eval_name = ""
        self.timer = StepTimer(accelerator, self.model.config, "bfloat16" if args.bf16 else str(self.model.dtype))
        self.packing = enable_packing(self.model, args, has_dropout(self.model))
        wanted = self.baseline.requires
        self._recorders: dict[str, scoring.ScoringPass] = {}
        if "energies" in wanted:
            head = {"temperature": self.temperature, "fp32_head": args.cast_lm_head_to_fp32}
            self._recorders["energies"] = scoring.EnergyRecorder(self.model, **head)
        if "entropies" in wanted:
            self._recorders["entropies"] = scoring.EntropyRecorder()
        if "hidden_states" in wanted:
            self._recorders["hidden_states"] = scoring.PooledStates(accelerator.unwrap_model(self.model))
        self._gradients: scoring.GradientEnergies | None = None
        if "gradient_energies" in self.baseline.learns_from:
            self._gradients = scoring.GradientEnergies(accelerator.unwrap_model(self.model))
        self._critic: Critic | None = None
        if isinstance(self.baseline, LearnedBaseline):
            policy = accelerator.unwrap_model(self.model)
            self._critic = Critic(self.baseline, policy, self.processing_class, args, accelerator)
        self._scoring = list(self._recorders.values())
        if self._critic is not None and self._critic.hidden is not None:
            self._scoring.append(self._critic.hidden)
        self.policy_loss = PolicyLoss(self.objective, args, accelerator)
        self._scored: list[tuple[Tensor, Tensor]] | None = None
        # The micro-batch whose loss is computed, and the copy of it that TRL sees.
        self._in_loss: list[dict[str, Any]] | None = None
        self._means = StepMeans()
        self._alarm = correction.RatioAlarm()
        self._correction: correction.RolloutCorrection | None = None
        self._window = 0
        # DeepSpeed and FSDP put the model on its device when training begins, where its kernels are.
        here = next(self.model.parameters()).device.type == accelerator.device.type and has_weights(self.model)
        self._asks_model = policy_is_sharded(accelerator) or not here
        if not self._asks_model:
            self._settle_packing(self.model)
        if self.policy_loss.own is not None:
            # TRL would log how its own loss clips, which is not the loss that is minimised.
            self.loss_type = SILENT_LOSS_TYPE
        self._finite = FiniteGradients(args.max_nonfinite_steps)
        self._monitor: GradientMonitor | None = None
        if args.log_gradient_variance:
            self._monitor = GradientMonitor(self.model, accelerator, fp16=args.fp16)

    def _loss_scores_rollouts(self) -> bool:
        """Whether vLLM's correction can use the log-probabilities of the loss's own pass, and nothing else needs a pass
        before.

        The policy that the loss scores must be the one that sampled, to the bit, unless the correction reads no policy.
        """
        args = self.args
        if args.vllm_importance_sampling_mode == BYPASS:
            return True
        corrected = self.use_vllm and args.vllm_importance_sampling_correction
        # A generation batch that outlasts an optimizer step would be scored by a policy that did not sample it.
        aligned = args.gradient_accumulation_steps % self._generate_every == 0
        wanted = self._recorders or {"values", "log_probs", "rollout_weights"} & set(self.baseline.requires)
        in_reward = args.beta != 0.0 and args.kl_placement == "reward"
        free = not (wanted or in_reward or self.packing.noisy)
        return args.packing == "auto" and corrected and aligned and free

    def _settle_packing(self, model: Any) -> None:
        """Ask `model`, once, which way of scoring gives the log-probabilities of rows alone; a sharded one can be asked
        when it is wrapped. Says what a run without packing, sharing or moving of rows loses. Collective if it is
        sharded.
        """
        self._asks_model = False
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(self.accelerator.mixed_precision))
        # TRL may have cast the head, and quantised weights are smaller than what they are computed in.
        own = min((weight.dtype for weight in self.model.parameters()), key=lambda dtype: dtype.itemsize)
        precisions = [Precision.of(mixed or own, self.accelerator.autocast)]
        # Without autocast, faults of structure are not lost in rounding; a sharded model has it built in.
        if mixed is not None and model is self.model:
            precisions.insert(0, Precision.of(own))
        whole = has_weights(self.model) and not policy_is_sharded(self.accelerator)
        unscored = torch.full((1, ASKED), IGNORED, device=self.accelerator.device)
        asked = {} if whole else {"labels": unscored, "fused_lm_head": True}
        # Kernels such as flash attention's refuse float32.
        with self.accelerator.autocast():
            noisy = any(gather_object([draws_random_numbers(model, **asked)]))
        method = method_of(self.model, self.args, noisy)
        given = (self.args, self._asked_prompts, precisions, self._longest_row, whole)
        self.packing = agreed(lambda: settled(model, method, *given))
        # What FSDP2 has gathered it gives back in a backward pass, which does not follow here.
        for module in [part for part in model.modules() if isinstance(part, FSDPModule)]:
            module.reshard()
        by_rows = ["router_aux_loss_coef"] * self.aux_loss_enabled
        by_rows += sorted(IMAGES & set(getattr(self.train_dataset, "column_names", None) or ()))
        check_token_budget(self.args, self.objective, self.packing, by_rows)
        self._correction = correction.RolloutCorrection(self.args) if self._loss_scores_rollouts() else None
        self._window, why = self._order_window()
        if self.accelerator.is_main_process:
            for line in packing_lines(self.packing, why):
                print(line, flush=True)

    def _order_window(self) -> tuple[int, str]:
        """The number of micro-batches of an optimizer step, among which rows may move; 0 if their order matters, and
        then why."""
        args = self.args
        each = args.steps_per_generation, args.gradient_accumulation_steps
        on = depending_on_micro_batches(args, self.objective) + ["router_aux_loss_coef"] * self.aux_loss_enabled
        why = ""
        if max(each) % min(each):
            why = "neither of steps_per_generation and gradient_accumulation_steps divides the other"
        elif on:
            why = f"the loss depends on which rows share a micro-batch ({', '.join(on)})"
        return (0 if why or not self.packing.packed else min(each)), why

    def _build_selection(self) -> None:
        ids = prompt_ids_of(self.train_dataset, self.reads)
        self.dataset_identity = run_state.dataset_identity(ids)
        self._epoch_order: tuple[int, list[int]] = (-1, [])
        # Whether batches in dataset order are taken by their number, not from the data loader.
        self._by_number = False
        self.selection: Selection | None = None
        self._resampling: Resampling | None = None
        self._coverage: Coverage | None = None
        if self.args.max_generations is not None:
            # What TRL makes of a group, when it generates and in its logs, is right of rollouts one by one.
            self.num_generations = 1
        elif self.sampler.in_dataset_order:
            self._coverage = Coverage(ids) if ids and not self.draws_problems else None
            return
        assert ids is not None, "a stream is refused before the model is loaded"
        run = (self.args, self.accelerator, self._reward_range)
        self.selection = Selection(self.sampler, self.baseline, self.train_dataset, ids, *run)
        if self.sampler.max_refills:
            scores = (self._scores, self._scores_unlogged)
            self._resampling = Resampling(self.selection, self._generate_counted, *scores, self.reward_weights)

    def _build_stream(self) -> StreamedBatches:
        args = self.args
        engine = self.vllm_generation
        engine.require_keeping()
        assert args.batches_in_flight is not None
        served = (self._generate_every, args.gradient_accumulation_steps)
        kind = f"{self.num_generations} x {reward_code(self.functions)}"
        pace = Pace(args.max_staleness, args.batches_in_flight, *served, args.rollout_timeout, kind)
        stream = Stream(self, pace) if self.accelerator.is_main_process else None
        return StreamedBatches(engine, stream, pace, self._block, self.train_dataset)

    def _block(self, number: int) -> Draw:
        """The prompts of a generation batch, drawn by the sampler or, in dataset order, those of TRL's sampler."""
        if self.selection is not None:
            return self.selection.draw(number)
        size = self.args.prompts_per_batch
        epoch, place = divmod(number, len(self.train_dataset) // size)
        if self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, list(islice(self.epoch_order(epoch), 0, None, self.num_generations)))
        return Draw(torch.tensor(self._epoch_order[1][place * size : (place + 1) * size]), None, {})

    def log_metric(self, name: str, value: float) -> None:
        """Add a value to a metric of the mode (training or evaluation) that the model is in; the log has their mean."""
        self._metrics["train" if self.model.training else "eval"][name].append(value)

    def _log_all(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.log_metric(name, value)

    @property
    def _generate_every(self) -> int:
        """Micro-batches that one generation batch serves."""
        return int(self.args.steps_per_generation * self.num_iterations)

    # Draw.

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        training = self.model.training
        if training:
            self._take_gradients()
        if training and self._streamed is not None:
            inputs = self._streamed_rows(self._streamed)
        elif training and self.selection is not None:
            inputs = self.selection.rows(self._generation_batch)
            if self._resampling is not None:
                # TRL does not hand the rows on to `_generate`, which resamples.
                self._resampling.inputs = inputs
        elif training and self._by_number:
            rows = self._block(self._generation_batch).rows.repeat_interleave(self.num_generations)
            inputs = rows_of_rank(self.train_dataset, rows, self.accelerator)
        mode = self.args.vllm_importance_sampling_mode
        is_ours = mode in (*REJECTIONS, BYPASS)
        with ExitStack() as recordings:
            if is_ours:
                # TRL knows its own modes only.
                recordings.enter_context(attributes(self, vllm_importance_sampling_mode="sequence_mask"))
            for each in self._scoring if training else []:
                recordings.enter_context(each.recording())
            if training and self._correction is not None:
                # Without its own correction TRL makes no scoring pass; the loss's pass takes its place
                # (`RolloutCorrection`).
                recordings.enter_context(attributes(self, vllm_importance_sampling_correction=False))
                if mode == BYPASS:
                    # It would still make one where a generation batch outlasts an optimizer step.
                    recordings.enter_context(attributes(self.args, gradient_accumulation_steps=self._generate_every))
            if training and self._streamed is not None:
                # The conversations had environments of their own; TRL would reset those that an evaluation has left.
                given = {"environment_factories": None, "environments": None, "rollout_func": self._handed_over}
                recordings.enter_context(attributes(self, **given))
            # Environments, tools and rewards are called in there.
            recordings.enter_context(self._numbers.lent())
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if is_ours and "importance_sampling_ratio" in output:
            weights = correction.correction_weights(self.args, output, output["old_per_token_logps"])
            output["importance_sampling_ratio"] = weights
        if not training:
            # There is nothing to learn in an evaluation, and a value table need not know its prompts.
            self._eval_scores.add(self._total())
            return output
        self._log_mismatch(output)
        self._log_all(padding_metrics(output, self.accelerator))
        if self.use_vllm:
            self.log_metric("rollout/sync_error", self.vllm_generation.sync_error)
        output["advantages"] = self._advantages(inputs, output)
        if self._gradients is not None:
            self._gradients.prepare(output, self.accelerator.process_index)
        if self.tools and self.args.filter_void_turns:
            self.turns.drop_void(output)
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if isinstance(generation_batch, dict):
            # `training_step` has prepared it already.
            return generation_batch
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before:
            return inputs
        if budget := self.args.per_device_token_budget:
            # Where generation and optimizer are out of step, rows stay in their micro-batch.
            given = (self._buffered_inputs, self._window or 1, budget, self.packing.shared)
            self._buffered_inputs = by_tokens(self.accelerator, *given)
        elif self._window and "pixel_values" not in self._buffered_inputs[0]:
            self._buffered_inputs = reordered(self._buffered_inputs, self._window, self.packing.shared)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _ids(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        return [row_id(row, self.reads) for row in rows]

    def _name_problem(self, row: dict[str, Any], prompt: Any) -> None:
        """Put into a row the prompt that an environment has made of it, and the id by which it is still known."""
        known = played_id(row, self.reads, prompt) if self.draws_problems else row_id(row, self.reads)
        row |= {"prompt_id": known, "prompt": prompt}

    def _streamed_rows(self, streamed: StreamedBatches) -> list[dict[str, Any]]:
        """This rank's rows of the next generation batch, whose rollouts have ended. The stream gets this step's weights
        first, and then the prompts of a later batch, of which it draws rollouts while this one is trained on."""
        number = self._generation_batch
        step = self.state.global_step
        # Not by what an optimizer step has: the count goes on where a run ended, or was saved, with other steps.
        offset = self._step - self._last_step[0]
        micro_batches = (self.state.max_steps - step) * self.args.gradient_accumulation_steps - offset
        # Rounded up: the last generation batch may serve fewer micro-batches than the others.
        last = number - (-micro_batches // self._generate_every)
        with self.timer.measure("generation"):
            if step != self._last_loaded_step:
                self.vllm_generation.sync_weights()
                self._last_loaded_step = step
            ahead = streamed.pace.batches
            streamed.fill(min(last, number + ahead), number)
            draw, rollouts, rewards = streamed.take(number, step, offset)
            self._known_rewards = rewards.to(self.accelerator.device)
            streamed.fill(min(last, number + 1 + ahead))
        if streamed.stream is not None:
            self._log_all(streamed.stream.metrics(step, number))
            for name, values in streamed.stream.grader.take_metrics().items():
                self._pending_metrics[name].extend(values)
        if self.selection is not None:
            self.selection.adopt(number, draw)
        mine = len(rollouts) // self.accelerator.num_processes
        first = self.accelerator.process_index * mine
        self._served = rollouts[first : first + mine]
        self._turn_rewards = [each.turn_rewards for each in self._served]
        rows = rows_of_rank(self.train_dataset, draw.rows.repeat_interleave(self.num_generations), self.accelerator)
        for place, (row, rollout) in enumerate(zip(rows, self._served, strict=True)):
            self._name_problem(row, rollout.prompt)
            for column, value in rollout.logged.items():
                values = self._pending_extra_logs[column]
                values += [None] * (place - len(values)) + [value]
        return rows

    # Generate.

    def _generate(self, prompts: list[Any]) -> Any:
        # TRL adds later turns to the prompts.
        self._begun = [list(each) for each in prompts] if self.environment_factories is not None else []
        with self.timer.measure("generation"), reading_calls():
            if self._resampling is not None and self.model.training:
                given = (prompts, self._generation_batch, self._pending_extra_logs)
                result, self._known_rewards = self._resampling.generated(*given)
                return result
            return self._generate_counted(prompts)

    def _generate_counted(self, prompts: list[Any]) -> Any:
        result = super()._generate(prompts)
        if self._served is not None:
            # As they were graded.
            result = (*result[:3], [each.completion for each in self._served], *result[4:])
            self._served = None
        if self.model.training:
            count = len(prompts) * self.accelerator.num_processes
            # TRL has just logged the mean length over all ranks.
            self.spending.draw(count, round(self._metrics["train"]["completions/mean_length"][-1] * count))
        return result

    def _handed_over(self, *given: Any) -> dict[str, list[Any]]:
        """The rollouts that a stream has brought, as TRL takes them from a `rollout_func`."""
        assert self._served is not None
        fields = {"prompt_ids": "prompt_ids", "completion_ids": "completion_ids", "logprobs": "log_probs"}
        if not self.tools:
            # With tools TRL takes it from the loop over turns; without it, what stands for a failed rollout has a loss.
            fields["env_mask"] = "tool_mask"
        return {key: [getattr(each, name) for each in self._served] for key, name in fields.items()}

    def _generate_single_turn(self, prompt_ids: Any, images: Any, fields: Any, *args: Any, **kwargs: Any) -> Any:
        if self.turns.running:
            count_turn(self.environments)
        # Turns after the first one run in step with all ranks. With images there is one rank (`check_tools`).
        if self.turns.running and not (images or fields):
            result: Any = self.turns.turn(prompt_ids)
            assert result is not None
        else:
            result = self._sampled_turn(prompt_ids, images, fields, *args, **kwargs)
            require_tokens(result[0], "vLLM" if self.use_vllm else "generate")
        return result

    def _sampled_turn(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's turn by this run's settings alone, cut at the run's stop strings."""
        if self.use_vllm:
            with self._numbers.back():
                return super()._generate_single_turn(*args, **kwargs)
        stops = [StopStrings(self._tokenizer, self._stop_strings)] if self._stop_strings else []
        model = self.accelerator.unwrap_model(self.model_wrapped)
        generating = generating_by(model, self.generation_config, stops, share=not policy_is_sharded(self.accelerator))
        # Autocast keeps its 16-bit copies of the weights until the outermost context ends: here they are made once,
        # not once for each token.
        with self._numbers.back(), self.accelerator.autocast(), generating:
            completion_ids, log_probs = super()._generate_single_turn(*args, **kwargs)
        for lengths in (each.lengths.tolist() for each in stops if each.lengths is not None):
            completion_ids = [ids[:length] for ids, length in zip(completion_ids, lengths, strict=True)]
        return completion_ids, log_probs

    def _tool_call_loop(self, prompts: Any, prompt_ids: list[list[int]], *args: Any) -> tuple[Any, ...]:
        if (served := self._served) is not None:
            masks = [each.tool_mask for each in served]
            given = ([each.completion for each in served], [each.completion_ids for each in served])
            counts = (sum(each.calls for each in served), sum(each.failed_calls for each in served))
            return masks, *given, [each.log_probs for each in served], *counts, [[] for _ in served]
        count_turn(self.environments, is_first=True)
        return self.turns.loop(super()._tool_call_loop, self._sampled_turn, prompts, prompt_ids, *args)

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
        self.turns.take_answers(tool_messages)
        return super()._get_tool_suffix_ids(tool_messages)

    def _room(self, longest: int, most: int) -> AbstractContextManager[None]:
        """Within it no more than `most` tokens are generated; by a server, no more than `longest` with the prompt."""
        if self.use_vllm:
            return attributes(self.vllm_generation, max_completion_length=most, longest=longest)
        return self._generation_config(max_new_tokens=most)

    def _greedy(self) -> AbstractContextManager[None]:
        """Within it generation is greedy, whichever engine does it."""
        settings: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        if self.use_vllm:
            return attributes(self.vllm_generation, **settings)
        return self._generation_config(do_sample=False, **dict.fromkeys(settings))

    def _generation_config(self, **changes: Any) -> AbstractContextManager[None]:
        config = copy.deepcopy(self.generation_config)
        config.update(**changes)
        return attributes(self, generation_config=config)

    def _generate_unlogged(self, prompts: list[Any]) -> tuple[list[Any], list[list[int]], int]:
        """One rollout per prompt, with all turns; nothing of it is logged.

        Returns:
            The rollouts, their token ids, and how many tokens are the model's own.
        """
        apart = attributes(self, _metrics=copy.deepcopy(self._metrics), num_generations=1)
        with reading_calls(), apart, attributes(self.state, num_input_tokens_seen=0):
            _, ids, mask, rollouts, *_ = super()._generate(prompts)
        return rollouts, ids, sum(map(len, ids)) if mask is None else sum(map(sum, mask))

    # Score.

    @property
    def reward_funcs(self) -> list[Any]:
        """The reward functions as TRL calls them: an exception is raised on all ranks together, later
        (`RewardGuard`)."""
        return self._guarded

    @reward_funcs.setter
    def reward_funcs(self, functions: list[Any]) -> None:
        self.functions = functions
        # While TRL's constructor runs there is no guard yet.
        guard = getattr(self, "_guard", None)
        self._guarded = functions if guard is None else guard.guarded(functions, self.reward_func_names)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, token_ids: Any) -> Tensor:
        if self.tools:
            self._log_all(self.turns.take_metrics(completions))
        rewards = self._known_rewards
        self._known_rewards = None
        if rewards is None:
            rewards = self._scores(inputs, prompts, completions, token_ids)
            self._turn_rewards = self._guard.turn_rewards(len(prompts))
        elif self._streamed is None:
            self._turn_rewards = []
        self._rewards_per_func = rewards
        for row, prompt in zip(inputs, self._begun, strict=False):
            self._name_problem(row, prompt)
        for column in {*self._logs["extra"], *self._pending_extra_logs}:
            # A function may log in some batches only, or not for each rollout. One value per rollout keeps rows
            # together.
            values = self._pending_extra_logs[column]
            values[:] = [*values, *[None] * len(prompts)][: len(prompts)]
        self._drawn = list(map(Rollout, prompts, completions, token_ids, map(self.is_truncated, token_ids)))
        return rewards

    def _scores(self, inputs: Any, prompts: Any, completions: Any, token_ids: list[list[int]]) -> Tensor:
        """``(N, F)`` of all ranks' rollouts. Raises RewardFailed on every rank if a function fails on one."""
        rows = [{**row, "truncated": self.is_truncated(ids)} for row, ids in zip(inputs, token_ids, strict=True)]
        stream = self._streamed.stream if self._streamed is not None else None
        with nullcontext() if stream is None else stream.grader.alone(stream.pace.seconds):
            scores: Tensor = super()._calculate_rewards(rows, prompts, completions, token_ids)
        self._guard.check()
        return scores

    def is_truncated(self, token_ids: Sequence[int]) -> bool:
        """Whether the length limit cut a rollout off. Ending at a stop string leaves no end token either."""
        return len(token_ids) >= (self.max_completion_length or 1) and token_ids[-1] not in self.eos_token_ids

    def _scores_unlogged(self, *given: Any) -> Tensor:
        """The same; what reward functions log is dropped."""
        logs = (self._pending_extra_logs, self._pending_metrics)
        before = copy.deepcopy(logs)
        scores = self._scores(*given)
        # In place, because `Resampling` holds the same two dictionaries.
        for log, old in zip(logs, before, strict=True):
            log.clear()
            log.update(old)
        return scores

    def _total(self) -> Tensor:
        """``(N,)`` weighted sums of the rewards of the batch at hand."""
        assert self._rewards_per_func is not None
        return total_rewards(self._rewards_per_func, self.reward_weights, self.reward_func_names)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        scorer = Scorer(model, self.packing)
        called: Any = scorer
        for each in self._scoring:
            called = each.listen(called, scorer)
        # The loss's own pass counts as time of the loss.
        around = self.timer.measure("scoring") if self._in_loss is None else nullcontext()
        if self._gradients is not None and self._in_loss is not None:
            around = self._gradients.of_loss(self._in_loss[0], scorer)
        if kwargs.get("batch_size") and (budget := self.args.per_device_token_budget):
            kwargs["batch_size"] = rows_within(self.accelerator, args[1], budget)
        with self._numbers.back(), around:
            result = super()._get_per_token_logps_and_entropies(called, *args, **kwargs)
        if self._in_loss is not None:
            self.timer.went_through(*scorer.sizes)
        if self._scored is not None:
            self._scored.append(result[:2])
        if self._correction is not None and self._in_loss is not None:
            whole = self._correction.add(self._in_loss, result[0], parts_of(self._buffered_inputs))
            if whole is not None:
                self._log_mismatch(whole)
        return result

    def _log_mismatch(self, output: dict[str, Any]) -> None:
        """How far the engine is from the policy, once a generation batch is scored."""
        mismatch = correction.rollout_mismatch(self.accelerator, output)
        self._log_all(mismatch)
        self._alarm.check_sample_size(mismatch.get("rollout/ess", 1.0))
        if "importance_sampling_ratio" in output:
            found = correction.correction_metrics(self.accelerator, output)
            if self._correction is None:
                # TRL has logged its own values under these names; ours take their place.
                for name in found:
                    self._metrics["train"][name].pop()
            self._log_all(found)
            self._alarm.check(found["sampling/importance_sampling_ratio/mean"])

    def _old_log_probs(self, output: dict[str, Any]) -> Tensor:
        """``(B, T)`` log-probabilities of the policy that sampled: TRL's, or of one scoring pass where it made none."""
        if "old_per_token_logps" in output:
            return output["old_per_token_logps"]
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        tokens = output["completion_ids"].shape[1]
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            log_probs, _, _ = self._get_per_token_logps_and_entropies(
                self.model, ids, mask, tokens, batch_size=self.args.per_device_train_batch_size
            )
        return log_probs

    def _signals(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> dict[str, Any]:
        """The optional fields of the batch that the baseline or the settings ask for, each by its row of `SIGNALS`."""
        wanted = set(self.baseline.requires)
        if "reward_parts" in wanted:
            wanted.add("reward_weights")
        if self.args.beta != 0.0 and self.args.kl_placement == "reward":
            wanted.add("kl")
        if self._scoring and "old_per_token_logps" not in output:
            with ExitStack() as recordings:
                for each in self._scoring:
                    recordings.enter_context(each.recording())
                self._old_log_probs(output)
        return {name: compute(self, inputs, output) for name, compute in SIGNALS.items() if name in wanted}

    def _rewards_of_turns(self, output: dict[str, Any]) -> Tensor | None:
        """``(B, T)`` the part of the rewards that belongs to turns, weighted as they are; None if there is none."""
        if not any(gather_object([any(map(any, self._turn_rewards))])):
            return None
        weights = self.reward_weights.tolist()
        totals = [
            [sum(map(mul, weights, turn)) for turn in zip_longest(*by_function, fillvalue=0.0)]
            for by_function in self._turn_rewards
        ]
        return at_turn_ends(totals, action_mask(output))

    def _kl_in_reward(self, output: dict[str, Any]) -> Tensor:
        """``(B, T)`` penalty of each token, ``beta * KL(pi_old || pi_ref)`` (REINFORCE++ Eq. 4); logs ``kl``."""
        penalty = kl_estimate(self._old_log_probs(output), output["ref_per_token_logps"], self.args.kl_estimator)
        self._log_all(token_means(self.accelerator, {"kl": penalty}, action_mask(output)))
        return self.args.beta * penalty

    def _greedy_rewards(self, inputs: list[dict[str, Any]]) -> Tensor:
        """``(N,)`` reward of the greedy rollout of each row's prompt, the same on every rank.

        Each rank generates for the distinct prompts among its own rows. Generation is collective (ZeRO-3, the vLLM
        server), so all ranks ask for the same number: a rank with fewer repeats its last one.
        """
        device = self.accelerator.device
        names = self._ids(inputs)
        rows = [names.index(name) for name in dict.fromkeys(names)]
        counts = self.accelerator.gather(torch.tensor([len(rows)], device=device))
        rows += [rows[-1]] * (int(counts.max()) - len(rows))
        asked = [dict(inputs[row]) for row in rows]
        prompts = [row["prompt"] for row in asked]
        with self._numbers.lent():
            with self._greedy():
                rollouts, token_ids, tokens = self._generate_unlogged(prompts)
            scores = self._scores_unlogged(asked, prompts, rollouts, token_ids)
        generated = self.accelerator.reduce(torch.tensor([len(rows), tokens], device=device), reduction="sum")
        self.spending.draw(*generated.tolist())
        rewards = total_rewards(scores, self.reward_weights).tolist()
        by_name = dict(zip(gather_object([names[row] for row in rows]), rewards, strict=True))
        return torch.tensor([by_name[name] for name in gather_object(names)], dtype=torch.float32)

    # Estimate.

    def _advantages(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> Tensor:
        """This rank's advantages; the whole batch's go into the logs."""
        mask = action_mask(output)
        rewards = self._total()
        sizes: Tensor | int = self.args.num_generations
        if self.selection is not None:
            sizes = self.selection.sizes(self._generation_batch)
        batch = gather_batch(
            self.accelerator,
            rewards=rewards,
            prompt_ids=self._ids(inputs),
            action_mask=mask,
            group_ids=torch.arange(len(rewards) // self.args.num_generations).repeat_interleave(sizes),
            step=self._generation_batch,
            signals=self._signals(inputs, output),
        )
        self._uniform.check(batch.rewards)
        told = self._first.add(batch.rewards, self._drawn)
        if told is not None and self.accelerator.is_main_process:
            print(told, flush=True)
        result = self._checked_advantages(batch)
        values = result.values
        weights = self.selection.weights(batch.step) if self.selection is not None else None
        if weights is not None:
            # One weight per rollout, which all of its tokens share.
            values = values * weights.to(values).reshape(-1, *[1] * (values.ndim - 1))
        # On a name clash the baseline's metric wins.
        own = {f"baseline/{key}": value for key, value in result.metrics.items()}
        self._log_advantages(batch, values, advantage_metrics(batch, replace(result, values=values)) | own)
        self._log_difficulty(inputs, batch.rewards)
        self._keep_rollouts(inputs, output, batch, result.baseline)
        chosen = self.selection or self._coverage
        if chosen is not None:
            # The selection forgets the batch's draw here.
            self._log_all(chosen.take_metrics(batch))
        discarded = None
        if self._resampling is not None:
            discarded = self._resampling.take_discarded(batch.step, "prompt_texts" in self.baseline.requires)
        # The baseline learns from a batch when the policy has been trained on all of it.
        self._pending.add(batch, self._step + self._generate_every, discarded)
        self._generation_batch += 1
        return local_rows(values, self.accelerator, len(inputs), mask.shape[1])

    def _checked_advantages(self, batch: RolloutBatch) -> Advantages:
        """What the baseline makes of the batch.

        Raises:
            ValueError: advantages of another shape, or for tokens where the objective averages them; or they or the
                baseline are not finite.
        """
        result = self.baseline.advantages(batch)
        name = type(self.baseline).__name__
        if tuple(result.values.shape) not in {batch.action_mask.shape, batch.rewards.shape}:
            raise ValueError(
                f"{name} returned advantages of shape {tuple(result.values.shape)} for a batch of (N, T) = "
                f"{tuple(batch.action_mask.shape)}. `basis_rl.conformance.check_baseline` tells what else it breaks."
            )
        if result.values.ndim == 2:
            check_token_advantages(name, self.objective)
        # A baseline that is not finite may have an advantage of 0 everywhere.
        for what, found in (("advantages that are", result.values), ("a baseline that is", result.baseline)):
            if not bool(found.isfinite().all()):
                raise ValueError(f"{name} returned {what} not finite in generation batch {batch.step}.")
        return result

    def _log_advantages(self, batch: RolloutBatch, values: Tensor, metrics: dict[str, float]) -> None:
        self._log_all(metrics)
        # With one rollout per prompt TRL's share is always 1.0; `advantages/zero` has the true one.
        if self.num_generations == 1:
            self._metrics["train"].pop("frac_reward_zero_std", None)
        # The log has room for one generation batch, so these push out the advantages that TRL logged.
        self._logs["advantages"].extend(per_rollout(values, batch.action_mask))

    def _keep_rollouts(self, inputs: Any, output: dict[str, Any], batch: RolloutBatch, baseline: Tensor) -> None:
        """Keep the rollouts of all ranks, which TRL has gathered on each of them for its own log."""
        if not self.args.keep_rollouts_mb:
            return
        chances = self.selection.chances(batch.step) if self.selection is not None else None
        pairs = zip(self._drawn, inputs, strict=True)
        ends = gather_object([(len(each.token_ids), each.truncated, row.get("solution")) for each, row in pairs])
        if self.accelerator.is_main_process:
            values = per_rollout(baseline, batch.action_mask)
            rows = rollout_rows(self._logs, batch, values, chances, ends)
            # As an example, one prompt as the model read it, in the chat template.
            rows[0]["rendered"] = self._tokenizer.decode(output["prompt_ids"][0][output["prompt_mask"][0].bool()])
            self._kept_rollouts.add(rows)

    def _log_difficulty(self, inputs: list[dict[str, Any]], rewards: Tensor) -> None:
        column = self.args.difficulty_column
        if column is None:
            return
        means = mean_by(gather_object([str(row[column]) for row in inputs]), rewards)
        self._log_all({f"reward/{column}/{name}": value for name, value in means.items()})

    # Loss and update.

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        alone = self.policy_loss.is_trl_alone
        metrics = self._metrics["train" if self.model.training else "eval"]
        tokens = int(action_mask(inputs).sum())
        # TRL's ratios of whole rollouts have one value for each.
        whole = self.importance_sampling_level == "sequence" and inputs["advantages"].ndim == 1
        of_rollouts = ("vespo/", "clip_ratio/") if whole else ("vespo/",)
        rows = len(inputs["completion_mask"])
        real = inputs.get("real_rows", rows)
        taking = self._means.taking(metrics, tokens, (rows, real), of_rollouts)
        in_loss = [inputs] if self.model.training else None
        with self.timer.measure("loss"), taking, attributes(self, _in_loss=in_loss):
            loss = self._trl_loss(model, inputs) if alone else self._own_loss(model, inputs)
        self.timer.loss_ended(torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)[:real])
        # While a critic warms up, the policy does not learn. The loss is multiplied by 0 and not replaced, so that the
        # backward pass, which is collective, still runs on every rank.
        learned = self.baseline if isinstance(self.baseline, LearnedBaseline) and self.model.training else None
        return loss * 0.0 if learned and learned.policy_waits(self._generation_batch - 1) else loss

    def _trl_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss: Tensor = super().compute_loss(model, inputs)
        return loss * self.policy_loss.row_weight(inputs)

    def _own_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss without its KL term, and our terms, from one scoring pass."""
        given = self.policy_loss.for_trl(inputs)
        if self._in_loss is not None:
            self._in_loss.append(given)
        scored: list[tuple[Tensor, Tensor]] = []
        # With beta 0 TRL leaves out its own KL term; `terms` adds ours.
        with attributes(self, beta=0.0, _scored=scored):
            loss = self._trl_loss(model, given)
        ((log_probs, entropy),) = scored
        accumulation = float(self.current_gradient_accumulation_steps) if self.model.training else None
        terms, metrics = self.policy_loss.terms(
            inputs, log_probs, entropy, lambda given: self._token_masks(given, inputs), accumulation
        )
        if "policy_loss" in metrics:
            # TRL's entry is the loss of advantages that are 0; ours takes its place.
            self._metrics["train" if self.model.training else "eval"]["policy_loss"].pop()
        self._log_all(metrics)
        return loss + terms

    def _token_masks(self, given: LossInputs, inputs: dict[str, Any]) -> Tensor:
        """``(B, T)`` or ``(B, 1)``: TRL's two masks, by which it multiplies the losses of any objective."""
        factor = torch.ones_like(given.log_probs[:, :1])
        mask = action_mask(inputs)
        if self.top_entropy_quantile < 1.0:
            factor = factor * self.get_high_entropy_mask(given.entropy, mask, 1 - self.top_entropy_quantile)
        if self.off_policy_mask_threshold is not None:
            factor = factor * self.get_off_policy_mask(
                advantages=given.token_advantages,
                per_token_logps=given.log_probs,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", given.old_log_probs),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        return factor

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """One of TRL's micro-batches: with a budget of tokens it may be several, each with its own backward pass, or
        none."""
        began = time.perf_counter()
        # As transformers does before it prepares the inputs.
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        parts = parts_of([self._prepare_inputs(inputs)])
        loss = torch.zeros((), device=self.accelerator.device)
        for part in parts[:-1]:
            with self._unsynchronized(model):
                # TRL's own would count a micro-batch.
                loss = loss + super(GRPOTrainer, self).training_step(model, part, *args, **kwargs)
            self.timer.backward_ended()
        self._current_train_step_time += time.perf_counter() - began
        if not parts:
            self._step += 1
            return loss
        loss = loss + super().training_step(model, parts[-1], *args, **kwargs)
        self.timer.backward_ended()
        if self._monitor is not None:
            self._monitor.count()
        return loss

    @contextmanager
    def _unsynchronized(self, model: Any) -> Iterator[None]:
        """Within it gradients are only added up: the last backward pass of an optimizer step averages them over
        ranks."""
        state = self.accelerator.gradient_state
        # DeepSpeed goes by the flag, and before the last micro-batch of a step transformers sees to it.
        by_flag = self.is_deepspeed_enabled or state.plugin_kwargs.get("sync_each_batch") or not state.sync_gradients
        with attributes(state, sync_gradients=False), nullcontext() if by_flag else self.accelerator.no_sync(model):
            yield

    def _get_grad_norm(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(model, *args, **kwargs)
        if not self._finite.keeps(model, norm, self.state.global_step + 1):
            self.log_metric("gradient/skipped_steps", float(self._finite.skipped))
        if self._monitor is not None:
            self._log_all(self._monitor.close(norm))
        return norm

    # Learn.

    def _take_gradients(self) -> None:
        """Complete the newest generation batch, once the policy has used it up, with what its losses told."""
        if self._gradients is None or not self._pending.without_gradients(self._step):
            return
        parts = parts_of(self._buffered_inputs)
        # Rollouts of a run that was saved with another target have no place for them.
        if "global_row" in parts[0]:
            self._pending.complete(gather_rows(self.accelerator, *self._gradients.taken(parts)))

    def _learn(self) -> None:
        """Let the baseline learn from the batches that are used up: the policy was updated on all of them.

        Discarded rollouts update beliefs only: without them, a belief would know only the groups that the sampler
        keeps.
        """
        check_weights(self.accelerator, self.model, self.state.global_step)
        self._log_all(self.timer.take())
        self._log_all(self._means.take(self.accelerator))
        self._take_gradients()
        for batch, discarded in self._pending.due(self._step):
            self.baseline.update(batch)
            if discarded is not None and isinstance(self.baseline, ValueBelief):
                self.baseline.update(discarded)
            for each in (batch, discarded):
                if self.selection is not None and each is not None:
                    self.selection.update(each)
            if self._critic is not None:
                self._log_all({f"baseline/{key}": value for key, value in self._critic.learn(batch).items()})
        self._last_step = (self._step, self._generation_batch, self._buffered_inputs, self.spending.drawn)
        if self._streamed is not None:
            self._streamed.settle(self._generation_batch)

    # The run: epochs, evaluation, log.

    @guarded_output()
    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As in transformers; ``True`` resumes from the newest checkpoint that is whole, ``"auto"`` if there is one.

        SIGTERM, SIGUSR1, SIGHUP, Ctrl-C or a file ``STOP`` in ``output_dir`` stop it after the current step, with a
        checkpoint. While it waits for a vLLM server, a signal stops it at once. `stop_on_signal.stopped` is then
        True. From a checkpoint at or after ``max_steps`` nothing is trained, and `was_finished` is then True.

        Raises:
            KeyboardInterrupt: Ctrl-C or the file ``STOP`` stopped it.
            SystemExit: another signal did; the code is 128 and the signal's number, 143 for SIGTERM.
            ValueError: no such checkpoint, or one of another run; another run is writing to ``output_dir``, or has left
                checkpoints there and neither ``resume_from_checkpoint`` nor ``overwrite_output_dir`` is set.
            NonFiniteGradients: too many steps in a row without a finite gradient, or (`WeightsLost`) such weights.
            ServerLost: the vLLM server failed and did not come back; a checkpoint has been written.
            RequestRefused: it refused a request or answered it wrongly; a checkpoint has been written.
            RewardFailed: a reward function raised or returned an invalid reward, or no rollout has one; a checkpoint
                has been written.
            PeerLost: another rank is gone; nothing is saved, since saving takes all ranks.
            SelectionFailed: the prompt sampler failed, or has no prompts for a batch; a checkpoint has been written.
            DiskFull: something could not be written, or (`FolderLost`) ``output_dir`` no longer exists.
        """
        end_with_launcher()
        place = str(self.args.output_dir)
        with ExitStack() as stack:
            stack.enter_context(naming_a_full_disk(place, only_writes=False))
            stack.enter_context(naming_lost_peers())
            # First the folder: a run that may not write must not take the server from another one.
            run = stack.enter_context(held(place))
            if self.use_vllm:
                stack.enter_context(self.vllm_generation.held(run, place))
            if self._streamed is not None:
                # In threads of their own, at any time.
                stack.enter_context(reading_calls())
            stack.enter_context(self.stop_on_signal.listening())
            self._resumed = on_main_process(lambda: self._start(resume_from_checkpoint))
            stack.enter_context(attributes(self.args, save_total_limit=None))
            try:
                result = super().train(resume_from_checkpoint=self._resumed, **kwargs)
                self.publisher.finish()
            # Raised on every rank.
            except errors.StopAsked as error:
                # The signal came while a server was waited for.
                self.stop_on_signal.stopped = True
                self.stop_on_signal.number = error.args[0]
                self._save_last_step()
                self.publisher.finish()
            except _FAILURES as error:
                if not isinstance(error, errors.NonFiniteGradients):
                    self._save_last_step()
                # All ranks wait together: launchers kill the others when the first one ends.
                self.publisher.finish()
                raise
            finally:
                if self._streamed is not None and self._streamed.stream is not None:
                    self._streamed.stream.close()
                self.publisher.wait_for_own()
        self._end_if_stopped()
        self._first.require_scores()
        return result

    def _end_if_stopped(self) -> None:
        """Say where a run is that a signal stopped, and raise what ends the program."""
        if not self.stop_on_signal.stopped:
            return
        if self.accelerator.is_main_process:
            kept = checkpoint.newest(str(self.args.output_dir))
            where = f"Checkpoint: {kept}. resume_from_checkpoint: auto goes on." if kept else "Nothing is saved."
            print(f"Stopped by a signal after step {self.state.global_step} of {self.state.max_steps}. {where}")
        raise self.stop_on_signal.raised

    def watch_server(self, given_up: Callable[[], bool]) -> None:
        """Stop waiting for a failed vLLM server when `given_up` says that it will not be started again."""
        self.vllm_generation.given_up = given_up

    def _start(self, asked: str | bool | None) -> str | None:
        """Find the checkpoint to start from, and move what belongs to another run aside."""
        output_dir = str(self.args.output_dir)
        found = checkpoint.resolve(asked, output_dir, self.args.overwrite_output_dir)
        for line in self.changed_settings(found):
            print(f"Resumed with another setting: {line}.", flush=True)
        if found is not None:
            run_state.refuse_repeated_stream(found, self.train_dataset)
        moved = checkpoint.make_room(output_dir, found)
        if moved is not None:
            print(f"Moved {len(list(moved.iterdir()))} files and folders of an earlier run into {moved}.", flush=True)
        if found is not None:
            self.publisher.catch_up()
        return found

    def changed_settings(self, folder: str | None) -> list[str]:
        """The settings in which this run differs from the checkpoint `folder`, one line each.

        Raises:
            ValueError: a difference that changes the order of the data or the meaning of the state.
        """
        if folder is None:
            return []
        before = run_state.saved_settings(folder)
        if before["day"] != template_day():
            use_day(before["day"])
            self._settings = run_state.settings_of(self, self._base, self._tokenizer)
        lines = run_state.compare_settings(folder, self._settings, self.args.allow_changed_settings)
        if not self._base["role"]:
            # Nothing needs the base model any more, so the run keeps naming the one that it began with.
            self._settings["base"] = before["base"]
            self.origin.first = {key: before["base"][key] for key in self.origin.base}
        return lines

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # transformers would look only after another step.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _save_last_step(self) -> None:
        """After a failed generation, save the optimizer step before it, unless that is done already."""
        last = Path(str(self.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        whole = on_main_process(lambda: checkpoint.is_complete(last))
        if whole or self.args.save_strategy == "no" or self.state.global_step == 0:
            return
        # Back to the end of that step: the state has moved on since.
        self._step, self._generation_batch, self._buffered_inputs, self.spending.drawn = self._last_step
        self._pending.forget(self._generation_batch)
        if self._streamed is not None:
            self._streamed.give_back(self._generation_batch)
        if self._critic is not None:
            self._critic.forget(self._generation_batch)
        self._save_checkpoint(self.model_wrapped, trial=None)

    def epoch_order(self, epoch: int) -> EpochIndices:
        """Indices of an epoch's rollouts into the dataset, each once, in the order in which they are generated."""
        return self._get_train_sampler(epoch=epoch)

    def _get_train_sampler(self, dataset: Dataset | None = None, epoch: int | None = None) -> EpochIndices:
        return EpochIndices(
            epoch=lambda: int(self.state.epoch or 0) if epoch is None else epoch,
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.args.num_generations,
            batch_size=self.args.prompts_per_batch,
            # The data loader reads a generation batch once for each micro-batch that is trained on.
            repeat_count=self._generate_every if epoch is None else 1,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    @guarded_output()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """As in transformers, with ``avg@k`` (k: ``num_generations_eval``) and ``pass@k`` of each set, and each set's
        metrics apart: ``eval_NAME_reward``. It does not change the training that follows: the random state is
        restored."""
        self._means.forget()
        self._eval_scores = EvalScores()
        self._eval_name = metric_key_prefix.removeprefix("eval").removeprefix("_")
        logs = {name: of_kind(rows, self.args.generation_batch_size) for name, rows in self._logs.items()}
        table = Path(str(self.args.output_dir)) / "completions" / f"completions_{self.state.global_step:05d}.parquet"
        # For several sets, transformers calls this method again for each.
        several = isinstance(self.eval_dataset if eval_dataset is None else eval_dataset, dict)
        mine = table if self.accelerator.is_main_process and self.log_completions and not several else None
        with (
            random_numbers_kept(self.accelerator.device),
            # Rollouts of an evaluation would push those of training out of TRL's log.
            attributes(self, _logs=logs),
            set_aside(mine, f"{metric_key_prefix}_{table.name}"),
        ):
            metrics: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self.model.training:
            metrics = self._metrics["eval"]
            self._log_all(self._means.take(self.accelerator))
            rows = getattr(self.callback_handler.eval_dataloader, "dataset", None)
            taken = self._eval_scores.take(self.num_generations_eval, len(rows) if has_length(rows) else None)
            metrics.update({key: [value] for key, value in taken.items()})
            if self._eval_name:
                # TRL logs the metrics of every evaluation set under the same names.
                for key in list(metrics):
                    metrics[f"{self._eval_name}_{key}"] = metrics.pop(key)
        # The log has the totals of the run already, and these belong to no step.
        if self.was_finished and "train_runtime" in logs:
            return
        # In place, as TRL adds its own, because `evaluate` returns this dictionary.
        logs.update(self.spending.metrics())
        mode = "train" if self.model.training else "eval"
        without_infinities(logs, self._metrics[mode])
        super().log(logs, start_time)

    # Checkpoints.

    def _parts(self) -> dict[str, Any]:
        """The parts that have a state of their own on each rank, by their names in a checkpoint."""
        parts = {
            "unlearnt": self._pending,
            "spending": self.spending,
            "gradients": self._finite,
            "uniform": self._uniform,
            "critic": self._critic,
            "selection": self.selection,
            "coverage": self._coverage,
            "stream": self._streamed,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def _save_parts(self, folder: Path) -> None:
        """What each rank needs to resume beside transformers' files; collective."""
        every = self._generate_every
        states = {name: part.state_dict() for name, part in self._parts().items()}
        states["place"] = {
            "step": self._step,
            "ranks": self.accelerator.num_processes,
            "generate_every": every,
            # Rollouts in use cannot be sampled again: the policy that sampled them has changed since.
            "rollouts": self._buffered_inputs if self._step % every else None,
            "metrics": {mode: dict(values) for mode, values in self._metrics.items()},
        }
        run_state.save_parts(folder, self.accelerator.process_index, states)
        if self.args.should_save:
            run_state.save_settings(folder, self._settings)
            if self.args.sync_ref_model:
                run_state.save_reference(folder, self.accelerator.unwrap_model(self.ref_model))
        if self._critic is not None:
            self._critic.save(folder)

    def _begin(self) -> None:
        """What training begins with, once TRL and transformers have theirs from the checkpoint."""
        self.spending = Usage()
        self.was_finished = False
        if self._resumed is not None:
            self._restore(self._resumed)
        if self._asks_model:
            self._settle_packing(self.model_wrapped)
        if self.is_world_process_zero():
            self._kept_rollouts.begin(self.state.global_step)

    def _restore(self, folder: str) -> None:
        """Restore `_save_parts`'s result; a part that the saving run did not have stays as it was built."""
        self._generation_batch = run_state.load_baseline(folder, self.baseline)
        states = run_state.load_parts(folder, self.accelerator.process_index)
        place = states["place"]
        ranks = self.accelerator.num_processes
        self._step = run_state.resumed_step(place, ranks=ranks, generate_every=self._generate_every)
        # transformers resumes its data loader by optimizer steps, of which the batches so far may have had others.
        elsewhere = self._step != self.state.global_step * self.args.gradient_accumulation_steps
        columns = getattr(self.train_dataset, "column_names", None) or ()
        self._by_number = elsewhere and isinstance(self.train_dataset, Dataset) and not IMAGES & set(columns)
        self._buffered_inputs = send_to_device(place["rollouts"], self.accelerator.device)
        for mode, values in place["metrics"].items():
            self._metrics[mode].update(values)
        for name, part in self._parts().items():
            if name in states:
                part.load_state_dict(states[name])
        if self.args.sync_ref_model:
            run_state.load_reference(folder, self.accelerator.unwrap_model(self.ref_model))
        if self._critic is not None:
            self._critic.load(folder)
        self._last_step = (self._step, self._generation_batch, self._buffered_inputs, self.spending.drawn)
        self.state.log_history = whole_log(Path(folder), self.state.log_history)
        self.was_finished = self.state.global_step >= self.state.max_steps

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        # `_write_checkpoint` marks a checkpoint itself, when all ranks have written their files.
        of_checkpoint = _internal_call and folder.name.startswith(PREFIX_CHECKPOINT_DIR)
        marks = self.args.should_save and not of_checkpoint
        with naming_a_full_disk(folder):
            if marks:
                checkpoint.begin(folder)
            # The arguments are saved, and pushed, with the model. As a call of the user it would push already.
            with attributes(self, args=without_secrets(self.args)):
                super().save_model(str(folder), _internal_call=True)
            if _internal_call and self.args.should_save:
                run_state.save_baseline(folder, self.baseline, self._generation_batch)
            if marks:
                checkpoint.mark_whole(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _checkpoint_size(self) -> float:
        """About how many bytes a checkpoint has."""
        modules: list[nn.Module] = [self.model]
        if self._critic is not None and not self.args.save_only_model:
            modules.append(self._critic.module)
        sizes = [
            # A parameter that ZeRO-3 shards is empty here; ds_numel is its full size.
            (getattr(p, "ds_numel", p.numel()), p.element_size(), p.requires_grad and not self.args.save_only_model)
            for module in modules
            for p in module.parameters()
        ]
        return sum(checkpoint_bytes(count, count * trained, bytes_each) for count, bytes_each, trained in sizes)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        needed = self._checkpoint_size()
        if self.args.should_save:
            check_place(str(self.args.output_dir))
        with naming_a_full_disk(str(self.args.output_dir), needed):
            self._write_checkpoint(model, trial)

    def _write_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            checkpoint.begin(folder)
        # No rank may write before the mark says that the checkpoint is incomplete.
        self.accelerator.wait_for_everyone()
        with attributes(self.state, log_history=newest_rows(self.state.log_history)):
            super()._save_checkpoint(model, trial)
        if not self.args.save_only_model:
            self._save_parts(folder)
        # All ranks must have written before their files are counted.
        self.accelerator.wait_for_everyone()
        written = {name for names in gathered(checkpoint.names_in(folder)) for name in names}
        if self.args.should_save:
            # If output_dir was removed in the meantime, the libraries have made it anew, with a part of the checkpoint.
            check_place(str(self.args.output_dir))
        on_main_process(lambda: checkpoint.finish(folder, written))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            in_use = [*([best] if best else []), *self.publisher.hub.in_use()]
            checkpoint.rotate(folder.parent, self._checkpoints_kept, in_use)
        if self.args.push_to_hub and self.is_world_process_zero():
            last = self.stop_on_signal.stopped or self.state.global_step >= self.state.max_steps
            if self.publisher.is_due(last):
                self.callback_handler.on_push_begin(self.args, self.state, self.control)
                self.publisher.push_checkpoint(folder, self.state.global_step)

    # The Hub.

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """No-op: `Publisher` already created the repository."""
        self.hub_model_id = self.publisher.hub.repo_id
        self.push_in_progress = None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """No-op: within transformers' saving the checkpoint is not complete yet. `_write_checkpoint` pushes it."""

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Push model, tokenizer, recipe, baseline state, log, evaluation results and card, as one commit.

        With ``hub_strategy`` ``checkpoint`` or ``all_checkpoints`` also those checkpoints whose push was skipped or has
        failed. Takes the arguments of transformers' `Trainer.push_to_hub`, and passes on those of `create_model_card`.

        Returns:
            On the main process what the Hub says of the commit (with ``blocking=False`` a future of it). None if the
            push failed, after `hub_retries` repetitions: a warning says how to push by hand, nothing is raised.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        # The card shows the repository's name.
        self.hub_model_id = self.publisher.set_repo(token, private)
        self.create_model_card(kwargs.pop("model_name", None), **kwargs)
        pushed: Future[CommitInfo | None] = Future()
        if self.is_world_process_zero():
            pushed = self.publisher.push_run(commit_message or "End of training", revision)
        if blocking:
            self.publisher.finish()
        if not self.is_world_process_zero():
            return None
        return pushed.result() if blocking else pushed

    def end(self) -> None:
        """As in transformers, after the pushes that are still running."""
        self.publisher.wait_for_own()
        super().end()

    def run_info(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: Iterable[str] = ()
    ) -> RunInfo:
        """What ``run.json`` and the model card tell about the run as it stands; see `create_model_card`."""
        return run_info(self, model_name or self.publisher.hub.name.split("/")[-1], dataset_name, tags)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write the model card and ``run.json`` into ``output_dir``, with a plot of the run.

        Without a recipe (`origin`) the settings that differ from their defaults are shown. A card that cannot be made
        is a warning.

        Args:
            model_name: title; default the repository's or the folder's name.
            dataset_name: of the training data, if it is on the Hub.
            tags: further ones.
        """
        if not self.is_world_process_zero():
            return
        given = {tags} if isinstance(tags, str) else set(tags or [])
        given |= {*self._tag_names, *(getattr(self.model, "model_tags", None) or [])}
        self.publisher.write_card(lambda: self.run_info(model_name, dataset_name, given), self.state.log_history)


# What computes each optional signal of a batch, from the trainer, the rows and TRL's output. Some are collective, so
# the order is the same on every rank. A signal of shape (N, T) (`basis_rl.types.SIGNALS`) is this rank's part, any
# other one the whole.
SIGNALS: dict[str, Callable[[BasisTrainer, list[dict[str, Any]], dict[str, Any]], Any]] = {
    "turn_rewards": lambda run, rows, output: run._rewards_of_turns(output),
    "energies": lambda run, rows, output: run._recorders["energies"].take(output),
    "entropies": lambda run, rows, output: run._recorders["entropies"].take(output),
    "hidden_states": lambda run, rows, output: run.accelerator.gather(run._recorders["hidden_states"].take(output)),
    "rollout_weights": lambda run, rows, output: correction.rollout_weights(output),
    "values": lambda run, rows, output: run._critic and run._critic.values(output, run._generation_batch),
    "log_probs": lambda run, rows, output: run._old_log_probs(output),
    "reward_parts": lambda run, rows, output: run._rewards_per_func,
    "reward_weights": lambda run, rows, output: run.reward_weights,
    "kl": lambda run, rows, output: run._kl_in_reward(output),
    "greedy_rewards": lambda run, rows, output: run._greedy_rewards(rows),
    "prompt_texts": lambda run, rows, output: gather_object([problem_text(row.get("prompt", "")) for row in rows]),
}


def _with_tokens(rollouts: dict[str, Any]) -> dict[str, Any]:
    require_tokens(rollouts.get("completion_ids", ()), "rollout_func")
    return rollouts


def _vllm(args: BasisConfig) -> AbstractContextManager[None]:
    try:
        from basis_rl.engine.generation import checked_generation
        from basis_rl.engine.weights import SyncSettings
    except ImportError as error:
        require_extra("vllm", "use_vllm")
        raise ValueError(f"use_vllm: vLLM is installed but cannot be imported: {error}") from error
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    exact = not (args.bf16 or args.fp16)
    fastest = "folder" if on_cpu or len(args.server_urls) > 1 else "nccl"
    settings = SyncSettings(
        transfer=fastest if args.vllm_weight_sync == "auto" else args.vllm_weight_sync,
        folder=Path(args.vllm_sync_folder) if args.vllm_sync_folder else None,
        tolerance=args.vllm_sync_tolerance if args.vllm_sync_tolerance is not None else 1e-3 if exact else 1.0,
        request_timeout=args.vllm_request_timeout,
        recovery_timeout=args.vllm_recovery_timeout,
        fp32_head=args.cast_lm_head_to_fp32,
        adapter=args.vllm_lora_sync == "adapter",
    )
    return checked_generation(settings)


class _UpdateBaseline(TrainerCallback):
    """Restores a checkpoint, and has the baseline learn after the step that ends a generation batch, before a save."""

    def __init__(self, trainer: BasisTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer._begin()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.timer.begin()
        self.trainer._means.forget()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trainer._learn()
        if state.is_world_process_zero:
            check_place(str(args.output_dir))
            self.trainer._kept_rollouts.write(state.global_step)
