"""vLLM's side: what runs inside its workers (``--worker-extension-cls``), and its engine in the trainer's process."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from basis_rl.engine.weights import sizes_of


class WeightSync:
    """Methods that the server offers over ``/collective_rpc``; ``self`` is vLLM's own worker.

    vLLM's `reload_weights` processes each layer again that a checkpoint names. No checkpoint names a tied ``lm_head``.
    The CPU build keeps its weights repacked, so it silently continues to serve the old head.
    """

    model_runner: Any
    model_config: Any
    reload_weights: Any

    def basis_state(self, token: str = "") -> dict[str, Any]:
        """What this worker is, and which run's weights it has.

        Args:
            token: path of a file that the trainer has just written.

        Returns:
            ``start``, new with each start of the server; the ``model``'s sizes; ``run``, ``owner`` and ``version`` of
            the weights (None: the checkpoint's); whether any run has sent ``merged`` weights; and whether this machine
            ``sees`` the file `token`.
        """
        if not hasattr(self, "_basis_state"):
            fresh = {"run": None, "owner": None, "version": 0, "merged": False}
            self._basis_state: dict[str, Any] = {"start": uuid.uuid4().hex, **fresh}
        model = sizes_of(self.model_config.hf_text_config)
        return {**self._basis_state, "model": model, "sees": Path(token).is_file()}

    def basis_hold(
        self, run: str, owner: dict[str, Any] | None, version: int, gone: str | None = None, merged: bool = False
    ) -> Any:
        """Reserve this worker for weights of a run, unless another run that has an owner holds it.

        Args:
            run: which run asks.
            owner: whose process that is; None releases the server.
            version: of the weights.
            gone: a run that may be replaced although it has an owner.
            merged: these weights replace those of the base model.

        Returns:
            `basis_state` afterwards; its ``run`` tells who has the server now.
        """
        state = self.basis_state()
        if state["owner"] is None or state["run"] in (run, gone):
            self._basis_state.update(run=run, owner=owner, version=version)
            self._basis_state["merged"] |= merged
        return self.basis_state()

    def basis_reload(self, folder: str) -> dict[str, Any]:
        """Load the safetensors files of `folder`; return the names of the heads that were tied again."""
        self.reload_weights(weights_path=folder)
        return {"tied": self.basis_retie()}

    def basis_progress(self) -> dict[str, int]:
        """Requests in flight by vLLM's names for them, and how many tokens of each are drawn."""
        return {name: len(each.output_token_ids) for name, each in self.model_runner.requests.items()}

    def basis_retie(self) -> list[str]:
        """Point a tied model's heads at its embedding once more and let the engine process them; returns their names.

        Raises:
            RuntimeError: the model has several embeddings, so it is not clear which one is meant.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        if not getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            return []
        modules = dict(self.model_runner.get_model().named_modules())
        heads = {name: module for name, module in modules.items() if isinstance(module, ParallelLMHead)}
        embeddings = [
            module
            for module in modules.values()
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        ]
        if heads and len(embeddings) != 1:
            raise RuntimeError(f"A tied model with {len(embeddings)} token embeddings: which one is the head's?")
        for head in heads.values():
            head.tie_weights(embeddings[0])
            head.quant_method.process_weights_after_loading(head)
        return list(heads)


def prompt_log_probs(engine: Any, token_ids: list[int]) -> Tensor:
    """``(L - 1,)`` log-probability of each token but the first, given those before it, as `engine` sees it."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
    (output,) = engine.generate([{"prompt_token_ids": token_ids}], settings, use_tqdm=False)
    rows = output.prompt_logprobs
    return torch.tensor([rows[i][token_ids[i]].logprob for i in range(1, len(token_ids))])
