"""A small model that vLLM's CPU build can serve, and the settings to train against a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from basis_rl.engine.server import Server, ServerOptions
from basis_rl.engine.weights import SyncSettings
from basis_rl.trainer import BasisTrainer
from benchmarks.trainers import qwen3_config
from tests.support.tiny import tiny_tokenizer, tiny_trainer

# A small cache and few sequences: the engine must start beside a trainer on two cores.
ENGINE = ("--max-num-seqs", "64", "--kv-cache-memory-bytes", str(16 << 20))
LORA = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)

SMALL_STREAM = {
    "rollouts": "stream",
    "max_staleness": 2,
    "batches_in_flight": 1,
    "vllm_importance_sampling_mode": "token_truncate",
}


def save_model(folder: Path, *, tied: bool, seed: int = 0, tokenizer: Any = None) -> Path:
    """A random Qwen3 of 0.4M parameters and its tokenizer; heads of a size that the engine has kernels for."""
    torch.manual_seed(seed)
    tokenizer = tokenizer or tiny_tokenizer()
    own = {"tie_word_embeddings": tied, "max_position_embeddings": 512, "initializer_range": 0.05, "inner": 2}
    model = Qwen3ForCausalLM(qwen3_config(len(tokenizer), 128, 2, 4, tokenizer=tokenizer, **own, bos_token_id=None))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def server(model: Path, log: Path, port: int = 0, max_lora_rank: int | None = None) -> Server:
    given = {"dtype": "float32", "max_model_len": 128, "extra": ENGINE, "max_lora_rank": max_lora_rank}
    return Server(ServerOptions(str(model), port=port, log=log, **given), 900)


def push(url: str, model: Path) -> None:
    """Give a server the weights of that checkpoint."""
    from basis_rl.engine.training_client import TrainingClient

    client = TrainingClient(SyncSettings("folder", None, 1e-3, 60.0, 60.0, False), url, connection_timeout=60.0)
    client.init_communicator()
    client.update_named_params(None, AutoModelForCausalLM.from_pretrained(model, dtype="float32").named_parameters())
    client.reset_prefix_cache()
    # The runs that come are of other processes.
    client.release()


def logged(trained: Any, key: str) -> list[float]:
    return [row[key] for row in trained.state.log_history if key in row]


def log_probs_of(model: Any, rollout: Any) -> torch.Tensor:
    """``(T,)`` of a rollout's completion, by the plain model."""
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    count = len(rollout.completion_ids)
    with torch.no_grad():
        hidden = model.model(input_ids=ids).last_hidden_state[0, -count - 1 : -1]
        log_probs = torch.nn.functional.linear(hidden, model.lm_head.weight).log_softmax(-1)
    return log_probs.gather(-1, ids[0, -count:, None])[:, 0]


class At(BasisTrainer):
    """Does something right before a generation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.acts: dict[int, Any] = {}
        super().__init__(*args, **kwargs)

    def _generate(self, prompts: Any) -> Any:
        act = self.acts.pop(self.state.global_step, None)
        if act is not None:
            act()
        return super()._generate(prompts)


def larger_half(completions, completion_ids, **kwargs):
    """1 for the half of the rows whose token ids sum to most, else 0.

    A server's samples are not those of another run; whatever they are, a group that is all of a rank's rows has both.
    """
    sums = [sum(ids) for ids in completion_ids]
    order = sorted(range(len(sums)), key=lambda row: (sums[row], row))
    return [float(order.index(row) >= len(sums) // 2) for row in range(len(sums))]


def trainer(folder: Path, model: Path, url: str, baseline: Any, cls: type = BasisTrainer, **given: Any) -> Any:
    served = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 60.0,
        "vllm_recovery_timeout": 90.0,
        "model_init_kwargs": {"dtype": "float32"},
        "max_completion_length": 12,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 1,
        "max_steps": 4,
        "reward_funcs": larger_half,
    }
    return tiny_trainer(folder, baseline, cls, model=Path(model), **{**served, **given})
