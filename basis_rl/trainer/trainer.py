"""`BasisTrainer`: TRL's `GRPOTrainer`, with the advantage taken from a baseline object."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from huggingface_hub import CommitInfo
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from trl import GRPOTrainer

from basis_rl.baselines import Baseline, LearnedBaseline
from basis_rl.data import problem_text
from basis_rl.functional.diagnostics import advantage_metrics, mean_by
from basis_rl.names import require_extra
from basis_rl.objectives import AnyObjective, objective_name
from basis_rl.report import plot_training
from basis_rl.run import checkpoint
from basis_rl.run.disk import checkpoint_bytes, naming_a_full_disk
from basis_rl.run.errors import NonFiniteGradients, RewardFailed, SelectionFailed, ServerLost, StopAsked, SyncError
from basis_rl.run.progress import use_progress_lines
from basis_rl.run.ranks import on_main_process
from basis_rl.run.run_lock import end_with_launcher, held
from basis_rl.run.usage import Spending
from basis_rl.samplers import PromptSampler
from basis_rl.trainer import settings
from basis_rl.trainer.config import BasisConfig, with_objective
from basis_rl.trainer.critic import Critic
from basis_rl.trainer.epoch_indices import EpochSampler
from basis_rl.trainer.evaluating import EvalScores, of_set, random_numbers_kept
from basis_rl.trainer.facts import Record, without_secrets
from basis_rl.trainer.faults import FiniteGradients, StopOnSignal
from basis_rl.trainer.gather import gather_batch, local_rows, row_prompt_id
from basis_rl.trainer.greedy import greedy_rewards
from basis_rl.trainer.inputs import as_baseline, as_config, as_dataset, as_rewards, as_sampler
from basis_rl.trainer.loss import PolicyLoss, kl_in_reward, old_log_probs
from basis_rl.trainer.ports import Stateful
from basis_rl.trainer.prefetch import Prefetch
from basis_rl.trainer.preflight import (
    baseline_of_settings,
    check_baseline_fits,
    check_dataset,
    check_eval_data,
    check_golds,
    check_greedy,
    check_pair,
    check_sampler_fits,
    check_single_turns,
    check_start,
    check_token_advantages,
    run_context,
)
from basis_rl.trainer.publish import Publisher
from basis_rl.trainer.resample import Refill
from basis_rl.trainer.rewarding import RewardGuard, UniformRewards, total_rewards
from basis_rl.trainer.scoring import EnergyRecorder, ScoringPass
from basis_rl.trainer.selection import Coverage, Selection
from basis_rl.trainer.stability import GradientMonitor, log_rollout_mismatch, rollout_weights
from basis_rl.trainer.state import (
    Place,
    Unlearnt,
    dataset_identity,
    load_baseline,
    load_parts,
    prompt_ids_of,
    save_baseline,
    save_parts,
)
from basis_rl.trainer.tool_check import as_functions, check_tools
from basis_rl.trainer.turns import Turns, reading_calls
from basis_rl.types import RolloutBatch


class BasisTrainer(GRPOTrainer):
    """PPO/GRPO training with a pluggable baseline.

    For each generation batch the rewards of all ranks are gathered, the baseline turns them into advantages
    (``(N,)`` or ``(N, T)``), and the objective does the rest. The trainer does not know which baseline it has.
    ``metrics.jsonl`` and ``training.png`` in ``output_dir`` hold what was logged.

    Args:
        model: Hub id, path, or a loaded model, as in TRL.
        reward_funcs: as in TRL; one or several of: a registered name (`basis_rl.rewards.registry.REWARDS`), an object,
            a function in TRL's form or its dotted path.
        args: a `BasisConfig`.
        train_dataset: a `Dataset` or a list of dictionaries, with the columns ``prompt`` (unless an
            `environment_factory` makes the prompts), those that the reward functions read, and optionally
            ``prompt_id``.
        eval_dataset: as in TRL, or a list of dictionaries.
        baseline: a registered name (`basis_rl.baselines.BASELINES`) or an object.
        objective: a registered name (`basis_rl.objectives.OBJECTIVES`), ``module:function``, or an object; None leaves
            the loss to `args` (TRL's default is ``dapo``).
        prompt_sampler: a registered name (`basis_rl.samplers.SAMPLERS`), ``module:Class``, or an object.
        **kwargs: everything else that `GRPOTrainer` takes, by name. `tools` may be objects too
            (`basis_rl.tools.PythonTool`).

    Raises:
        ValueError: before training starts, where something does not fit: baseline and group size, baseline and
            objective, dataset and columns, golds that do not verify against themselves, a value table that was built
            for another run.
    """

    _tag_names = ("trl", "basis-rl")
    _name = "BASIS"
    generation_config: Any

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
        **kwargs: Any,
    ) -> None:
        args, self.objective = with_objective(as_config(args, model), objective)
        self.baseline, self.sampler = as_baseline(baseline), as_sampler(prompt_sampler)
        self.baseline = baseline_of_settings(self.baseline, args)
        funcs, train_dataset = as_rewards(reward_funcs, args), as_dataset(train_dataset, "train_dataset")
        kwargs["eval_dataset"] = eval_dataset
        train_dataset, kwargs = self._checked(args, funcs, train_dataset, kwargs)
        self.publisher = Publisher(self, args)
        # What the methods below read while TRL's constructor runs.
        self.policy_loss, self.turns = PolicyLoss(self, self.objective), Turns(self)
        self.selection: Selection | None = None
        self._scoring: list[ScoringPass] = []
        with _vllm(args) if args.use_vllm else nullcontext():
            super().__init__(model=model, reward_funcs=funcs or None, args=args, train_dataset=train_dataset, **kwargs)
        use_progress_lines(self, plot_training)
        if type(self.baseline).validate is not Baseline.validate:  # before its belief is asked about the prompts
            known = (self.model.config, self._tokenizer, self.train_dataset, self.reward_funcs, self.args)
            self.baseline.validate(run_context(*known, tools=self.tools))
        self._build_parts()
        if args.use_vllm:
            self.vllm_generation.set_interrupt(self.stop_on_signal.interrupting)

    def _checked(
        self, args: BasisConfig, funcs: list[Any], dataset: Dataset | None, kwargs: dict[str, Any]
    ) -> tuple[Dataset | None, dict[str, Any]]:
        """Dataset and further arguments of TRL's trainer, checked before a model is loaded."""
        check_start(args)
        check_baseline_fits(self.baseline, args)
        check_greedy(self.baseline, kwargs)
        self.objective = check_pair(self.baseline, self.objective, args)
        check_sampler_fits(self.sampler, dataset, args, kwargs)
        if isinstance(dataset, Dataset):
            environments = kwargs.get("environment_factory") is not None
            check_dataset(dataset, args, funcs, environments=environments)
            dataset = check_golds(dataset, args, funcs)
            check_dataset(dataset, args, funcs, environments=environments)
        if kwargs.get("eval_dataset") is not None:
            kwargs["eval_dataset"] = check_eval_data(as_dataset(kwargs["eval_dataset"], "eval_dataset"), args, funcs)
        if args.async_prefetch:
            check_single_turns(dataset, kwargs)
        tools = as_functions(kwargs.get("tools"))
        check_tools(tools, kwargs.get("processing_class"), dataset, args, PartialState().num_processes)
        return dataset, {**kwargs, "tools": tools} if tools else kwargs

    def _build_parts(self) -> None:
        """What `BasisTrainer` adds to TRL's trainer, in components that see it through `basis_rl.trainer.ports`."""
        args, requires = self.args, self.baseline.requires
        self.record = Record.of(self.model.config, args, objective_name(self.objective))
        self.spending, self._eval_scores, self._eval_name = Spending(), EvalScores(), ""
        self._energies = EnergyRecorder(self) if "energies" in requires else None
        self._critic = Critic(self, self.baseline) if isinstance(self.baseline, LearnedBaseline) else None
        hidden = self._critic.hidden if self._critic is not None else None
        self._scoring = [each for each in (self._energies, hidden) if each is not None]
        self._monitor = GradientMonitor(self) if args.log_gradient_variance else None
        self._finite, self._uniform = FiniteGradients(self), UniformRewards(self)
        self._prefetch = Prefetch(self) if args.async_prefetch else None
        ids = prompt_ids_of(self.train_dataset)
        if not self.sampler.in_dataset_order:
            assert ids is not None  # checked before the model was loaded
            texts = (problem_text(row["prompt"]) for row in self.train_dataset)
            self.selection = Selection(self, self.sampler, self.baseline, ids, texts)
        self._coverage = Coverage(self, ids) if self.selection is None and ids else None
        self._refill = Refill(self) if self.selection is not None and self.sampler.max_refills else None
        self._place, self._unlearnt = Place(self), Unlearnt()
        self._generation_batch = 0
        self._last_step: tuple[int, int, Any, tuple[int, int]] = (0, 0, None, (0, 0))
        self.was_finished = False
        self._rewards_per_func: Tensor | None = None
        self.dataset_identity = dataset_identity(ids)
        self._settings = settings.settings_of(self, self._tokenizer, self.dataset_identity, self.tools or [])
        self.stop_on_signal = StopOnSignal(self)
        self.add_callback(_UpdateBaseline(self))
        self.add_callback(self.stop_on_signal)

    def log_metric(self, name: str, value: float) -> None:
        """Add a value to a metric of the mode (training or evaluation) that the model is in; the log has their mean."""
        self._metrics["train" if self.model.training else "eval"][name].append(value)

    def replace_metric(self, name: str, value: float) -> None:
        """Put a value in place of the last one that TRL has added to a metric."""
        self._metrics["train" if self.model.training else "eval"][name][-1] = value

    # Rollouts.

    def _generate(self, prompts: list[Any]) -> Any:
        with reading_calls():
            if self._refill is not None and self.model.training:
                return self._refill.generate(self._generate_counted, prompts)
            return self._generate_counted(prompts)

    def _generate_counted(self, prompts: list[Any]) -> Any:
        result = super()._generate(prompts)
        if self.model.training:
            count = len(prompts) * self.accelerator.num_processes
            self.spending.draw(count, round(self._metrics["train"]["completions/mean_length"][-1] * count))
        return result

    def _generate_single_turn(self, prompt_ids: Any, images: Any, fields: Any, *args: Any, **kwargs: Any) -> Any:
        if self.turns.running and not (images or fields):
            result: Any = self.turns.turn(prompt_ids)
            assert result is not None
        else:
            result = super()._generate_single_turn(prompt_ids, images, fields, *args, **kwargs)
        if self._prefetch is not None and self.model.training:
            self._prefetch.after_generation()
        return result

    def _tool_call_loop(self, prompts: Any, prompt_ids: list[list[int]], *args: Any) -> tuple[Any, ...]:
        return self.turns.loop(super()._tool_call_loop, super()._generate_single_turn, prompts, prompt_ids, *args)

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
        self.turns.take_answers(tool_messages)
        suffix: list[int] = super()._get_tool_suffix_ids(tool_messages)
        return suffix

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, *args: Any) -> Tensor:
        if self.tools:
            self.turns.log(completions)
        known = self._refill.take() if self._refill is not None and self.model.training else None
        rewards = self._scores(inputs, prompts, completions, *args) if known is None else known
        self._rewards_per_func = rewards
        return rewards

    def _scores(self, *given: Any) -> Tensor:
        """``(N, F)`` of all ranks' rollouts. Raises RewardFailed on every rank if a function fails on one."""
        guard = RewardGuard(self, self.reward_func_names)
        with patch.multiple(self, reward_funcs=guard.guarded(self.reward_funcs)):
            scores: Tensor = super()._calculate_rewards(*given)
        guard.check()
        return scores

    def _total(self) -> Tensor:
        """``(N,)`` weighted sums of the rewards of the batch at hand."""
        assert self._rewards_per_func is not None
        return total_rewards(self._rewards_per_func, self.reward_weights, self.reward_func_names)

    def score_rollouts(self, rows: Any, prompts: Any, rollouts: Any, token_ids: Any) -> Tensor:
        """``(N, F)`` of all ranks' rollouts; what reward functions log is kept."""
        return self._scores(rows, prompts, rollouts, token_ids)

    def rollouts_apart(self, prompts: list[Any]) -> tuple[list[Any], list[list[int]], int]:
        """One rollout of each prompt, all turns, without a trace in the logs: the rollouts, their token ids, and how
        many tokens are the model's own."""
        prompt_ids, images, fields = self._tokenize_prompts(prompts)
        completion_ids, _ = self._generate_single_turn(prompt_ids, images, fields, 1)
        if not self.tools:
            rollouts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
            if not isinstance(prompts[0], str):
                rollouts = [[{"role": "assistant", "content": text}] for text in rollouts]
            return rollouts, completion_ids, sum(map(len, completion_ids))
        first = self.turns.first(prompt_ids, completion_ids)
        mask, rollouts, ids, *_ = self._tool_call_loop(prompts, prompt_ids, completion_ids, first, None, None, {})
        return rollouts, ids, sum(map(sum, mask))

    def scores_apart(
        self, rows: Sequence[Any], prompts: list[Any], rollouts: list[Any], token_ids: list[list[int]]
    ) -> Tensor:
        """``(N, F)`` of all ranks' rollouts; what reward functions log is dropped."""
        logs = {name: copy.deepcopy(getattr(self, name)) for name in ("_pending_extra_logs", "_pending_metrics")}
        with patch.multiple(self, **logs):
            return self._scores(rows, prompts, rollouts, token_ids)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.selection is not None and self.model.training:
            inputs = self.selection.rows(self._generation_batch)
            if self._refill is not None:
                self._refill.inputs = inputs
        with ExitStack() as recordings:
            for scoring in self._scoring if self.model.training else []:
                recordings.enter_context(scoring.recording())
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.model.training:  # in evaluation there is nothing to learn, and a table need not know the prompts
            log_rollout_mismatch(self, output)
            if self.use_vllm:
                self.log_metric("rollout/sync_error", self.vllm_generation.sync_error)
            output["advantages"] = self._advantages(inputs, output)
            if self.tools and self.args.filter_void_turns:
                self.turns.drop_void(output)
        else:
            names = gather_object([row_prompt_id(row) for row in inputs])
            self._eval_scores.add(names, self._total(), self.num_generations_eval)
        return output

    def _advantages(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> Tensor:
        """This rank's advantages; the whole batch's go into the logs."""
        parts, requires = self._rewards_per_func, self.baseline.requires
        assert parts is not None
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        batch = gather_batch(
            self.accelerator,
            rewards=self._total(),
            inputs=inputs,
            action_mask=mask,
            num_generations=self.num_generations,
            step=self._generation_batch,
            energies=self._energies.take(output) if self._energies else None,
            rollout_weights=rollout_weights(output) if "rollout_weights" in requires else None,
            values=self._critic.values(output, self._generation_batch) if self._critic else None,
            log_probs=old_log_probs(self, output) if "log_probs" in requires else None,
            reward_parts=(parts, self.reward_weights) if "reward_parts" in requires else None,
            kl=kl_in_reward(self, output),
            greedy_rewards=greedy_rewards(self, inputs) if "greedy_rewards" in requires else None,
            with_texts="prompt_texts" in requires,
        )
        self._uniform.check(batch.rewards)
        result = self.baseline.advantages(batch)
        name = type(self.baseline).__name__
        if tuple(result.values.shape) not in {batch.action_mask.shape, batch.rewards.shape}:
            raise ValueError(
                f"{name} returned advantages of shape {tuple(result.values.shape)} for a batch of (N, T) = "
                f"{tuple(batch.action_mask.shape)}. `basis_rl.conformance.check_baseline` tells what else it breaks."
            )
        if result.values.ndim == 2:
            check_token_advantages(name, self.objective)
        if not bool(result.values.isfinite().all()):
            raise ValueError(f"{name} returned advantages that are not finite in generation batch {batch.step}.")
        own = {f"baseline/{key}": value for key, value in result.metrics.items()}  # of a name that both have, its own
        values = result.values
        if self.selection is not None:
            weights = self.selection.weights(batch.step)
            if weights is not None:
                values = values * weights.to(values).reshape(-1, *[1] * (values.ndim - 1))
            self.selection.log(batch)
        if self._coverage is not None:
            self._coverage.log(batch)
        self._log_advantages(batch, values, advantage_metrics(batch, replace(result, values=values)) | own)
        self._log_difficulty(inputs, batch.rewards)
        used_up = self._step + self.args.steps_per_generation * self.num_iterations
        self._unlearnt.add(batch, used_up)
        self._generation_batch += 1
        return local_rows(values, self.accelerator, len(inputs), mask.shape[1])

    def _log_advantages(self, batch: RolloutBatch, values: Tensor, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self.log_metric(key, value)
        if self.num_generations == 1:  # TRL's is always 1.0 then; `advantages/zero` is the true one
            self._metrics["train"].pop("frac_reward_zero_std", None)
        if values.ndim == 2:
            values = (values.cpu() * batch.action_mask).sum(dim=1) / batch.action_mask.sum(dim=1).clamp(min=1)
        self._logs["advantages"].extend(values.tolist())  # it holds one generation batch: TRL's own are pushed out

    def _log_difficulty(self, inputs: list[dict[str, Any]], rewards: Tensor) -> None:
        column = self.args.difficulty_column
        if column is None:
            return
        for name, value in mean_by(gather_object([str(row[column]) for row in inputs]), rewards).items():
            self.log_metric(f"reward/{column}/{name}", value)

    # Loss and gradient.

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        for scoring in self._scoring:
            model = scoring.listen(model)
        result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        self.policy_loss.scored(*result[:2])
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        if self._monitor is not None:
            self._monitor.count()
        return loss

    def _get_grad_norm(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(model, *args, **kwargs)
        self._finite.check(model, norm)
        if self._monitor is not None:
            self._monitor.close(norm)
        return norm

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = self.policy_loss(super()._compute_loss, model, inputs)
        learned = self.baseline if isinstance(self.baseline, LearnedBaseline) and self.model.training else None
        return loss * 0.0 if learned and learned.policy_waits(self._generation_batch - 1) else loss

    # The run: baseline and critic learn, epochs, evaluation, log.

    def _learn(self) -> None:
        """Let the baseline learn from the batches that are used up: the policy was updated on all of them."""
        for batch in self._unlearnt.due(self._step):
            self.baseline.update(batch)
            if self.selection is not None:
                self.selection.update(batch)
            for key, value in self._critic.learn(batch).items() if self._critic else ():
                self.log_metric(f"baseline/{key}", value)
        self._last_step = (self._step, self._generation_batch, self._buffered_inputs, self.spending.drawn)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As in transformers; ``True`` resumes from the newest checkpoint that is whole, ``"auto"`` if there is one.

        SIGTERM, SIGUSR1, Ctrl-C or a file ``STOP`` in ``output_dir`` end it at the next step with a checkpoint, the
        signals at once while a vLLM server is waited for; `stop_on_signal.stopped` tells. A checkpoint at or after
        ``max_steps`` is loaded and nothing is trained; `was_finished` tells.

        Raises:
            ValueError: no such checkpoint, or one of another run; another run is going on in ``output_dir``, or its
                checkpoints lie there and neither ``resume_from_checkpoint`` nor ``overwrite_output_dir`` is given.
            NonFiniteGradients: too many steps in a row without a finite gradient.
            ServerLost: the vLLM server failed and did not come back; a checkpoint has been written.
            RewardFailed: a reward function raised or returned an invalid reward; a checkpoint has been written.
            SelectionFailed: the prompt sampler failed, or has no prompts for a batch; a checkpoint has been written.
        """
        end_with_launcher()
        with held(str(self.args.output_dir)), self.stop_on_signal.listening():
            found = on_main_process(lambda: self._start(resume_from_checkpoint))
            self.spending, self.was_finished = Spending(), False
            try:
                return super().train(resume_from_checkpoint=found, **kwargs)
            except StopAsked:  # raised on every rank
                return self._stopped_between_steps()
            except (ServerLost, SyncError, SelectionFailed, RewardFailed, NonFiniteGradients) as error:  # on every rank
                lost = not isinstance(error, NonFiniteGradients)
                if lost:
                    self._save_last_step()
                self.publisher.finish()  # together: launchers kill the others when the first one ends
                raise
            finally:
                self.publisher.wait_for_own()

    def _stopped_between_steps(self) -> TrainOutput:
        """End a run that was asked to stop while it waited for a server: the last whole step is saved."""
        self.stop_on_signal.stopped = True
        self._save_last_step()
        self.publisher.finish()
        return TrainOutput(self.state.global_step, 0.0, {})

    def watch_server(self, given_up: Callable[[], bool]) -> None:
        """Stop waiting for a failed vLLM server when `given_up` says that it will not be started again."""
        self.vllm_generation.given_up = given_up

    def _start(self, asked: str | bool | None) -> str | None:
        """The checkpoint to start from, with what is not of this run moved aside."""
        output_dir = str(self.args.output_dir)
        found = checkpoint.resolve(asked, output_dir, self.args.overwrite_output_dir)
        for line in self.changed_settings(found):
            print(f"Resumed with another setting: {line}.", flush=True)
        moved = checkpoint.make_room(output_dir, found)
        if moved is not None:
            print(f"Moved {len(list(moved.iterdir()))} files and folders of an earlier run into {moved}.", flush=True)
        if found is not None:
            self.publisher.catch_up()
        return found

    def changed_settings(self, folder: str | None) -> list[str]:
        """What this run has otherwise than the checkpoint `folder`, one line each.

        Raises:
            ValueError: something that gives the order of the data or the state another meaning.
        """
        if folder is None:
            return []
        return settings.compare(folder, self._settings, self.args.allow_changed_settings)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # transformers would look only after another step
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _save_last_step(self) -> None:
        """A checkpoint of the last whole optimizer step, if there is none, though a later generation has failed."""
        last = Path(str(self.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        saved = on_main_process(lambda: checkpoint.is_complete(last))
        if saved or self.args.save_strategy == "no" or self.state.global_step == 0:
            return
        if self._prefetch is not None:
            self._prefetch.drop()
        self._step, self._generation_batch, self._buffered_inputs, self.spending.drawn = self._last_step
        self._unlearnt.forget(self._generation_batch)
        if self._critic is not None:
            self._critic.forget(self._generation_batch)
        self._save_checkpoint(self.model_wrapped, trial=None)

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochSampler:
        repeat_count = self.num_iterations * self.args.steps_per_generation
        return self._sampler(dataset, lambda: int(self.state.epoch or 0), repeat_count)

    def epoch_order(self, epoch: int) -> EpochSampler:
        """Indices of an epoch's rollouts into the dataset, each once, in the order in which they are generated."""
        return self._sampler(None, lambda: epoch, 1)

    def _sampler(self, dataset: Dataset | None, epoch: Callable[[], int], repeat_count: int) -> EpochSampler:
        return EpochSampler(
            epoch=epoch,
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=repeat_count,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """As in transformers, with ``avg@k`` (k: ``num_generations_eval``) and ``pass@k`` of each set, and each set's
        metrics apart: ``eval_NAME_reward``. The training that follows is the same as without it: random numbers are put
        back."""
        self._eval_scores, self._eval_name = EvalScores(), metric_key_prefix.removeprefix("eval").removeprefix("_")
        with random_numbers_kept(self.accelerator.device):
            metrics: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self.model.training:
            metrics = self._metrics["eval"]
            metrics.update({key: [value] for key, value in self._eval_scores.take(self.num_generations_eval).items()})
            named = of_set(metrics, self._eval_name)
            metrics.clear()
            metrics.update(named)
        if self.was_finished and "train_runtime" in logs:  # of no step: the log has that of the run
            return
        logs.update(self.spending.metrics())  # in place, as TRL adds its own: `evaluate` returns them
        super().log(logs, start_time)

    # Checkpoints.

    def _parts(self) -> dict[str, Stateful]:
        """What has state of its own on each rank, beside model, optimizer and baseline."""
        parts: dict[str, Stateful | None] = {
            "place": self._place,
            "unlearnt": self._unlearnt,
            "spending": self.spending,
            "gradients": self._finite,
            "uniform": self._uniform,
            "critic": self._critic,
            "prefetch": self._prefetch,
            "selection": self.selection,
            "coverage": self._coverage,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        of_checkpoint = _internal_call and folder.name.startswith(PREFIX_CHECKPOINT_DIR)  # which has a mark already
        marks = self.args.should_save and not of_checkpoint
        if marks:
            checkpoint.begin(folder)
        super().save_model(output_dir, _internal_call=_internal_call)
        if _internal_call and self.args.should_save:
            save_baseline(folder, self.baseline, self._generation_batch, self.dataset_identity)
        if marks:
            checkpoint.end(folder)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        save_parts(output_dir, self.accelerator.process_index, self._parts())
        if self.args.should_save:
            settings.save(Path(output_dir), self._settings)
        if self._critic is not None:
            self._critic.save(output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        sizes = [
            (getattr(p, "ds_numel", p.numel()), p.element_size(), p.requires_grad) for p in self.model.parameters()
        ]
        needed = sum(checkpoint_bytes(count, count * trained, bytes_each) for count, bytes_each, trained in sizes)
        with naming_a_full_disk(str(self.args.output_dir), needed):
            self._write_checkpoint(model, trial)

    def _write_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            checkpoint.begin(folder)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # older ones go when this one is complete
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoint.finish(folder)
            best = self.state.best_model_checkpoint
            checkpoint.rotate(folder.parent, limit, [*([best] if best else []), *self.publisher.hub.in_use()])
        if self.args.push_to_hub and self.is_world_process_zero():
            last = self.stop_on_signal.stopped or self.state.global_step >= self.state.max_steps
            if self.publisher.is_due(last):
                self.callback_handler.on_push_begin(self.args, self.state, self.control)
                self.publisher.push_checkpoint(folder)

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint_folder)
        if checkpoint_folder is not None:
            self._generation_batch = load_baseline(checkpoint_folder, self.baseline, self.dataset_identity)
            load_parts(checkpoint_folder, self.accelerator.process_index, self._parts())
            if self._critic is not None:
                self._critic.load(checkpoint_folder)
            self._last_step = (self._step, self._generation_batch, self._buffered_inputs, self.spending.drawn)
            self.was_finished = self.state.global_step >= self.state.max_steps

    # The Hub.

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        args: BasisConfig = self.args
        self.args: BasisConfig = without_secrets(args)  # they are saved beside the model, and pushed with it
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args = args

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Has been done before the model was loaded."""
        self.hub_model_id = self.publisher.hub.repo_id
        self.push_in_progress = None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Not from within transformers' saving, where the checkpoint is not complete yet."""

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.publisher.finish()  # transformers deletes checkpoints in there
        return super()._finalize_training(*args, **kwargs)

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
        self.hub_model_id = self.publisher.introduce(token, private)  # for the name that the card tells
        self.create_model_card(kwargs.pop("model_name", None), **kwargs)
        pushed: Future[CommitInfo | None] = Future()
        if self.is_world_process_zero():
            pushed = self.publisher.push_run(commit_message or "End of training", revision)
        if blocking:
            self.publisher.finish()
        if not self.is_world_process_zero():
            return None
        return pushed.result() if blocking else pushed

    def _finish_current_push(self) -> None:
        self.publisher.finish()

    def end(self) -> None:
        """As in transformers, after the pushes that are still running."""
        self.publisher.wait_for_own()
        super().end()

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write the model card and the record of the run, ``run.json``, into ``output_dir``, with a plot of the run.

        Without a recipe (`record`) the settings that differ from their defaults are shown. A card that cannot be made
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
        self.publisher.write_card(model_name, dataset_name, given)


def _vllm(args: BasisConfig) -> AbstractContextManager[None]:
    try:
        from basis_rl.engine.generation import checked_generation
        from basis_rl.engine.weights import SyncSettings
    except ImportError as error:
        require_extra("vllm", "use_vllm")
        raise ValueError(f"use_vllm: vLLM is installed but cannot be imported: {error}") from error
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    exact = not (args.bf16 or args.fp16)
    settings = SyncSettings(
        transfer=("folder" if on_cpu else "nccl") if args.vllm_weight_sync == "auto" else args.vllm_weight_sync,
        folder=Path(args.vllm_sync_folder) if args.vllm_sync_folder else None,
        tolerance=args.vllm_sync_tolerance if args.vllm_sync_tolerance is not None else 1e-3 if exact else 1.0,
        request_timeout=args.vllm_request_timeout,
        recovery_timeout=args.vllm_recovery_timeout,
        fp32_head=args.cast_lm_head_to_fp32,
    )
    return checked_generation(settings)


class _UpdateBaseline(TrainerCallback):
    """Calls `Baseline.update` after the optimizer step that ends a generation batch, before a checkpoint is saved."""

    def __init__(self, trainer: BasisTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trainer._learn()
