"""The critic's networks: a head on hidden states, and a value model with a backbone of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from basis_rl.functional.packing import Packing


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
            values: Tensor = self.outer(inner)[..., 0]
        return values


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
        values: Tensor = self.head(before[:, -tokens:])
        return values

    def gradient_checkpointing_enable(self) -> None:
        """As of transformers' models, which do it in training mode only: layers are computed again in the backward."""
        self.train()
        self.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _load(kind: Any, name: str, **settings: Any) -> Any:
    try:
        return kind.from_pretrained(name, **settings)
    except (OSError, ValueError) as error:
        raise ValueError(f"ppo: critic_model '{name}' could not be loaded: {str(error)[:300]}") from error


def value_model_parameters(name: str) -> int:
    """Of `load_value_model`'s result, without its weights.

    Raises:
        ValueError: there is no such model.
    """
    from transformers import AutoConfig, AutoModel

    config = _load(AutoConfig, name)
    with torch.device("meta"):
        module = ValueModel(AutoModel.from_config(config), int(config.get_text_config().hidden_size))
    return sum(parameter.numel() for parameter in module.parameters())


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
        # A model that was saved without one: taken at its word.
        own = None
    policys = tokenizer.get_vocab()
    if own is not None and any(own.get(token) != number for token, number in policys.items()):
        raise ValueError(
            f"ppo: critic_model '{name}' has another tokenizer than the policy, and would read other tokens than were "
            "sampled. Take a model of the policy's family, or leave critic_model out for a head on the policy."
        )
    for module in backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return ValueModel(backbone, int(backbone.config.get_text_config().hidden_size))
