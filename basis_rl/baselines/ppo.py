"""PPO's critic as one more baseline (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from basis_rl.baselines.base import LearnedBaseline, Learning, TokenLoss, mean_of_others, scorable_rows
from basis_rl.baselines.gate import VarianceGate
from basis_rl.functional.gae import clipped_value_loss, explained_variance, gae, length_adaptive_lam
from basis_rl.functional.packing import Packing
from basis_rl.registry import OneOrMore, Positive, PositiveShare, Share, WholeNumber
from basis_rl.types import Advantages, RolloutBatch

_HEAD_RATE = 1e-3
# Ends of the class names of layers that mix tokens: attention, and what hybrid models have in its place.
_TOKEN_MIXER = re.compile(r"(Attention\d*|DeltaNet|Mixer|MambaLayer|ShortConv(olution)?|RecurrentBlock)$")


@dataclass(eq=False)
class Ppo(LearnedBaseline):
    """``A_t = sum_l (gamma lam)^l delta_{t+l}`` (`basis_rl.functional.gae.gae`) with a learned ``V``. G >= 1.

    The critic is a small head on the policy's last hidden states, detached, so that the policy's gradient does not
    change; or, with `critic_model`, a value model in float32, 16 bytes a parameter with AdamW. It learns from each
    generation batch after the policy, in as many minibatches as the policy takes optimizer steps in one pass, by
    `basis_rl.functional.gae.clipped_value_loss` with the targets ``R_t = A'_t + V_t``, ``A'`` being the estimate with
    `critic_lam`. Its gradient's norm is clipped at ``max_grad_norm``. It has its own optimizer, so no ``vf_coef``.

    In the warm-up the policy's whole loss is multiplied by 0, since Adam would amplify the noise of a KL term alone.
    Rollouts are generated and counted, and the learning rate's schedule continues; ``weight_decay`` is not paused.

    With lam = 1 the gradient is unbiased however wrong the value is; lam < 1 trades bias for variance. Whitening is
    that of verl and TRL; the mean that it subtracts contains the own reward.

    Metrics: ``explained_variance`` of the discounted return by the values before learning from it; ``value_mean``,
    ``value_target_mean``, ``value_loss``, ``value_clip_fraction``, ``critic_grad_norm``, ``critic_learning_rate``.

    Args:
        gamma: discount of a token, in (0, 1].
        lam: lambda of the advantages, in [0, 1].
        lam_alpha: lambda of the advantages is ``1 - 1 / (lam_alpha l)`` instead of `lam`, where l is the number of
            actions (`basis_rl.functional.gae.length_adaptive_lam`); None keeps `lam`.
        critic_lam: lambda of the critic's targets; None is `lam`. With ``lam < 1``, 1.0 keeps the targets unbiased
            (decoupled GAE, arXiv:2503.01491).
        cliprange_value: how far a value may move in one generation batch, in reward units; None does not clip.
        critic_model: Hub id or folder of the value model's backbone; "policy" is the model that the policy starts
            from, None a head on the policy.
        critic_learning_rate: None is 1e-3 for a head, 1e-5 for a value model.
        critic_epochs: passes over each generation batch.
        critic_warmup_steps: generation batches from which only the critic learns.
        critic_freeze_attention: keep the value model's attention as it was loaded (`freeze_attention`).
        whiten_advantages: ``(A - mean) / (std + 1e-8)`` over the action tokens of the global batch.
        ev_gate: use the critic only while it explains returns (`VarianceGate`), else the mean reward of the batch's
            other rollouts as the value of every token, and lam = 1.

    Raises:
        ValueError: a parameter out of its range.
    """

    gamma: PositiveShare = 1.0
    lam: Share = 1.0
    lam_alpha: Positive | None = None
    critic_lam: Share | None = None
    cliprange_value: Positive | None = 0.5
    critic_model: str | None = None
    critic_learning_rate: Positive | None = None
    critic_epochs: OneOrMore = 1
    critic_warmup_steps: WholeNumber = 0
    critic_freeze_attention: bool = False
    whiten_advantages: bool = True
    ev_gate: bool = False
    requires = LearnedBaseline.requires | {"turn_rewards"}
    # Whitening subtracts a mean in which the own reward is.
    uses_own_reward = True
    reads_kl = True
    token_level = "always"
    kept = ("gate.variances",)
    # The learning rate of a value model, if none is given.
    model_rate: ClassVar[float] = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic_freeze_attention and self.critic_model is None:
            raise ValueError(
                f"{type(self).__name__}: critic_freeze_attention needs a value model, but critic_model is null. Set "
                "critic_model: policy, or critic_freeze_attention: false."
            )
        self.gate = VarianceGate(self.ev_gate)
        self.scales = self.uses_own_reward = self.whiten_advantages
        self.reads_hidden_states = self.critic_model is None

    @property
    def learning(self) -> Learning:
        rate = self.critic_learning_rate or (self.model_rate if self.critic_model else _HEAD_RATE)
        return Learning(rate=rate, epochs=self.critic_epochs)

    def build_module(self, policy: Any, tokenizer: Any) -> nn.Module:
        if self.critic_model is None:
            return ValueHead(int(policy.config.get_text_config().hidden_size))
        name = self.critic_model
        if name == "policy":
            name = policy.config.name_or_path
            if not name:
                raise ValueError(
                    "critic_model 'policy' needs a policy that was loaded from the Hub or a folder. Name one of them "
                    "as critic_model."
                )
        model = load_value_model(name, tokenizer)
        if self.critic_freeze_attention:
            freeze_attention(model.backbone)
        return model

    def module_parameters(self, policy_config: Any) -> int:
        return sum(parameter.numel() for parameter in self._without_weights(policy_config).parameters())

    def frozen_parameters(self, policy_config: Any) -> int:
        if not self.critic_freeze_attention:
            return 0
        module = self._without_weights(policy_config)
        freeze_attention(module)
        return sum(parameter.numel() for parameter in module.parameters() if not parameter.requires_grad)

    def _without_weights(self, policy_config: Any) -> nn.Module:
        """The module on the meta device, where parameters have shapes, but no memory."""
        from transformers import AutoConfig, AutoModel

        others = self.critic_model not in (None, "policy")
        config = _load(AutoConfig, str(self.critic_model)) if others else policy_config
        hidden = int(config.get_text_config().hidden_size)
        with torch.device("meta"):
            return ValueHead(hidden) if self.critic_model is None else ValueModel(AutoModel.from_config(config), hidden)

    def policy_waits(self, step: int) -> bool:
        return step < self.critic_warmup_steps

    def _estimate(self, batch: RolloutBatch, lam: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values and estimates with `lam`, ``(N, T)`` float64, and the tokens that count; 0 elsewhere."""
        assert batch.values is not None
        counts = batch.action_mask & scorable_rows(batch)[:, None]
        values = torch.where(counts, batch.values.double(), 0.0)
        given = (batch.rewards, values, counts, batch.kl, batch.turn_rewards)
        return values, gae(*given, gamma=self.gamma, lam=lam), counts

    def advantages(self, batch: RolloutBatch) -> Advantages:
        lam = self.lam if self.lam_alpha is None else length_adaptive_lam(self.lam_alpha, batch.action_mask)
        values, estimate, counts = self._estimate(batch, lam)
        # The metrics compare with the whole return (lam = 1), whatever lam the policy's advantages have.
        whole = self.lam == 1 and self.lam_alpha is None
        returns = values + (estimate if whole else self._estimate(batch, 1.0)[1])
        metrics = self.gate.metrics()
        if bool(counts.any()):
            metrics |= {"value_mean": float(values[counts].mean()), "value_target_mean": float(returns[counts].mean())}
            explained = explained_variance(values, returns, counts)
            metrics |= {} if explained is None else {"explained_variance": explained}
        if not self.gate.is_open:
            constant = mean_of_others(batch)[:, None].expand_as(values)
            values, estimate, _ = self._estimate(replace(batch, values=constant), 1.0)
        if self.whiten_advantages and bool(counts.any()):
            found = estimate[counts]
            estimate = torch.where(counts, (estimate - found.mean()) / (found.std(correction=0) + 1e-8), 0.0)
        return Advantages(values=estimate, baseline=values, metrics=metrics)

    def update(self, batch: RolloutBatch) -> None:
        values, estimate, counts = self._estimate(batch, 1.0)
        self.gate.learn(values, values + estimate, counts)

    def loss(self, predicted: Tensor, batch: RolloutBatch) -> TokenLoss:
        lam = self.lam if self.critic_lam is None else self.critic_lam
        values, estimate, counts = self._estimate(batch, lam)
        old, targets, counts = (x.to(predicted.device) for x in (values.float(), (values + estimate).float(), counts))
        loss, clipped = clipped_value_loss(predicted, old, targets, self.cliprange_value)
        metrics = {"value_loss": loss.detach(), "value_clip_fraction": clipped}
        return TokenLoss(per_token=loss, counts=counts, metrics=metrics)


class ValueHead(nn.Module):
    """``V_t = w_2 silu(W_1 norm(h_t)) + b`` in float32, whatever the precision of h. ``(B, T, H) -> (B, T)``.

    The last layer starts at 0, and so does every value.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.inner = nn.Linear(hidden_size, hidden_size)
        self.outer = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        with torch.autocast(hidden_states.device.type, enabled=False):
            inner = nn.functional.silu(self.inner(self.norm(hidden_states.float())))
            return self.outer(inner)[..., 0]


class ValueModel(nn.Module):
    """A transformer and a `ValueHead`: ``V_t`` from the tokens before t.

    Args:
        backbone: returns ``last_hidden_state``, ``(B, L, H)``.
        hidden_size: H.
    """

    def __init__(self, backbone: Any, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = ValueHead(hidden_size)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        tokens: int,
        packing: Packing | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """``(B, T)`` values of the last T = `tokens` columns of ``(B, L)`` rows.

        Args:
            input_ids: the rows.
            attention_mask: 0 on padding.
            tokens: T.
            packing: of the rows, for a backbone that attends by segments (`basis_rl.trainer.attention`): it sees one
                row without padding. Tokens that are not scored get the value of a hidden state of 0.
            position_ids: of padded rows, where the backbone does not count from the mask.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if packing is not None:
            inputs = packing.model_inputs(input_ids)
        elif position_ids is not None:
            inputs["position_ids"] = position_ids
        hidden = self.backbone(**inputs, use_cache=False).last_hidden_state
        before = hidden[:, :-1] if packing is None else packing.unpack(hidden)
        return self.head(before[:, -tokens:])

    def gradient_checkpointing_enable(self) -> None:
        """As of transformers' models, which do it in training mode only: layers are computed again in the backward."""
        self.train()
        self.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _load(kind: Any, name: str, **settings: Any) -> Any:
    try:
        return kind.from_pretrained(name, **settings)
    except (OSError, ValueError) as error:
        raise ValueError(f"critic_model '{name}' could not be loaded: {str(error)[:300]}") from error


def load_value_model(name: str, tokenizer: Any) -> ValueModel:
    """The backbone of the model `name` (Hub id or folder) in float32, without dropout, and a new head.

    Raises:
        ValueError: it cannot be loaded, or its tokenizer gives other ids than `tokenizer`.
    """
    from transformers import AutoModel, AutoTokenizer

    backbone = _load(AutoModel, name, dtype=torch.float32)
    try:
        own = AutoTokenizer.from_pretrained(name).get_vocab()
    except (OSError, ValueError):
        # A model that was saved without a tokenizer: nothing to compare with.
        own = None
    policys = tokenizer.get_vocab()
    if own is not None and any(own.get(token) != number for token, number in policys.items()):
        way_out = "Take a model of the policy's family, or set critic_model to null for a head on the policy"
        raise ValueError(f"critic_model '{name}' has another tokenizer than the policy. {way_out}.")
    for module in backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return ValueModel(backbone, int(backbone.config.get_text_config().hidden_size))


def freeze_attention(backbone: nn.Module) -> None:
    """Take attention out of the training, and in hybrid models the layers in its place (linear attention, Mamba).

    All parameters of these layers are frozen, including norms within them. MLPs, experts, routers, the norms between
    layers and embeddings go on learning.

    Raises:
        ValueError: there is no such layer.
    """
    mixers = [module for module in backbone.modules() if _TOKEN_MIXER.search(type(module).__name__)]
    if not mixers:
        name = type(backbone).__name__
        raise ValueError(f"No attention was found in the critic's {name}. Set critic_freeze_attention: false.")
    for module in mixers:
        module.requires_grad_(False)
