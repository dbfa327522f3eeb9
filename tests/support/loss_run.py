"""A run for the loss alone: TRL's `_compute_loss` on given log-probabilities, without a model, and a micro-batch."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch
from trl import GRPOTrainer

from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.logs import StepMeans
from basis_rl.trainer.loss import SILENT_LOSS_TYPE, PolicyLoss
from basis_rl.trainer.step_time import StepTimer
from tests.support.tiny import config

LENGTHS = (6, 3, 5, 1)


class FakeRun(BasisTrainer):
    """A trainer that has only what the loss reads; log-probabilities and entropies are leaves."""

    def __init__(self, objective, *, training=True, accumulation=1, aux=None, vllm=False, **settings):
        settings = {"gradient_accumulation_steps": accumulation, "steps_per_generation": 4, **settings}
        self.args = args = config("unused", max_completion_length=9, **settings)
        self.loss_type = args.loss_type = getattr(objective, "loss_type", "dapo")
        self.importance_sampling_level = getattr(objective, "importance_sampling_level", "token")
        self.beta, self.max_completion_length = args.beta, args.max_completion_length
        self.epsilon_low, self.epsilon_high = args.epsilon, args.epsilon_high or args.epsilon
        self.current_gradient_accumulation_steps = accumulation
        self.top_entropy_quantile = args.top_entropy_quantile
        self.off_policy_mask_threshold = args.off_policy_mask_threshold
        self.entropy_coef, self.use_adaptive_entropy = args.entropy_coef, args.use_adaptive_entropy
        self._entropy_bonus_enabled = self.entropy_coef != 0.0
        self.aux, self.aux_loss_enabled, self.router_aux_loss_coef = aux, aux is not None, 0.5
        self.use_vllm, self.vllm_importance_sampling_correction = vllm, vllm
        self.model = SimpleNamespace(training=training, is_gradient_checkpointing=False)
        self.accelerator = SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            is_main_process=False,
            reduce=lambda x, reduction: x,
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            pad_across_processes=lambda x, **kwargs: x,
        )
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.state = SimpleNamespace(global_step=0)
        self.baseline = None
        self._scored = None
        self._in_loss = None
        self._means = StepMeans()
        self.timer = StepTimer(self.accelerator, None, "float32")
        self.policy_loss = PolicyLoss(objective, args, self.accelerator)
        if self.policy_loss.own is not None:
            self.loss_type = SILENT_LOSS_TYPE
        generator = torch.Generator().manual_seed(1)
        self.log_probs = (-0.2 - torch.rand(4, 6, generator=generator, dtype=torch.float64)).requires_grad_()
        self.entropy = torch.rand(4, 6, generator=generator, dtype=torch.float64).requires_grad_()

    @property
    def metrics(self):
        """Those of the mode, as lists."""
        of_tokens = {name: [value for value, *_ in each] for name, each in self._means._found.items()}
        return dict(self._metrics["train" if self.model.training else "eval"]) | of_tokens

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        if self._scored is not None:
            self._scored.append((self.log_probs, self.entropy))
        return self.log_probs, self.entropy, self.aux

    def trl_loss(self, model, inputs):
        return GRPOTrainer._compute_loss(self, model, inputs)

    def loss(self, inputs):
        """The policy's loss, and its gradients by log-probabilities and entropies."""
        return self.with_gradients(self.compute_loss(self.model, inputs))

    def with_gradients(self, loss):
        found = torch.autograd.grad(loss, [self.log_probs, self.entropy], retain_graph=True, allow_unused=True)
        return loss.detach(), *(torch.zeros(4, 6).double() if g is None else g for g in found)


def micro_batch(*, tools=False, old=True, tokens=False, vllm=None, seed=0):
    """A ragged micro-batch of 4 rollouts of a generation batch with three times as many action tokens.

    Args:
        tools: whether some completion tokens are tools' output.
        old: whether the policy has changed since it sampled.
        tokens: whether each token has an advantage of its own.
        vllm: None, or "token" or "sequence": rollouts of another engine, with weights of that level.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = (torch.arange(6)[None] < torch.tensor(LENGTHS)[:, None]).long()
    inputs = {
        "prompt_ids": torch.ones(4, 2).long(),
        "prompt_mask": torch.ones(4, 2).long(),
        "completion_ids": torch.ones(4, 6).long(),
        "completion_mask": mask,
        "advantages": normal(4, 6) if tokens else normal(4),
        "ref_per_token_logps": -normal(4, 6).abs(),
    }
    old_log_probs, sampled, weights = -normal(4, 6).abs(), -0.1 * normal(4, 6).abs(), 0.5 + normal(4, 6).abs()
    if old:
        inputs["old_per_token_logps"] = old_log_probs
    if tools:
        inputs["tool_mask"] = torch.ones_like(mask)
        inputs["tool_mask"][0, 1:3] = inputs["tool_mask"][2, 0] = 0
    if vllm is not None:
        inputs["sampling_per_token_logps"] = sampled
        inputs["importance_sampling_ratio"] = weights if vllm == "token" else weights[:, :1]
    inputs["num_items_in_batch"] = 3 * (mask * inputs.get("tool_mask", 1)).sum()
    return inputs
