"""A language model small enough for a laptop: its own tokenizer, a Qwen3 architecture, a short supervised warm start.

RL needs a model that is sometimes right. After about a minute of supervised training on sums, this one answers in the
form that the verifier reads; the rest is left to reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def build_tokenizer(texts: Iterable[str], vocab_size: int = 340) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on `texts`.

    Every digit is a separate token, so that the model can add numbers. Text that all problems share becomes few tokens,
    since words may be merged.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, padding_side="left")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int = 96, layers: int = 3, head_dim: int | None = None
) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights for the tokenizer, with four attention heads of size `head_dim`.

    The default of `head_dim` is a quarter of the hidden size.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim or hidden_size // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, dataset: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of prompt and boxed answer, padded on the right; and labels, which cover only the answer."""
    rows, labels = [], []
    for row in dataset:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        head = tokenizer(prompt)["input_ids"]
        tail = tokenizer(f"\\boxed{{{row['solution']}}}{END}")["input_ids"]
        rows.append(head + tail)
        labels.append([-100] * len(head) + tail)
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    return ids, torch.tensor([label + [-100] * (width - len(label)) for label in labels])


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    dataset: Dataset,
    *,
    until: float = 0.45,
    max_steps: int = 3000,
    batch_size: int = 64,
    learning_rate: float = 1.5e-3,
) -> tuple[int, float]:
    """Train supervised on the answers until the share `until` of them is predicted completely (teacher-forced).

    The number of steps varies a lot with the seed, because the model learns to carry suddenly. Stopping at an accuracy
    leaves the same room for improvement with every seed. Returns the number of steps and the share that was reached.
    """
    ids, labels = encode(tokenizer, dataset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    model.train()
    right = 0.0
    progress = tqdm(range(max_steps), desc="warm start", unit="step", mininterval=5)
    for step in progress:
        rows = torch.randint(len(ids), (batch_size,))
        output = model(
            input_ids=ids[rows], attention_mask=(ids[rows] != tokenizer.pad_token_id).long(), labels=labels[rows]
        )
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        wanted = labels[rows][:, 1:]
        whole = ((output.logits[:, :-1].argmax(-1) == wanted) | (wanted == -100)).all(dim=1).float().mean()
        right += 0.05 * (float(whole) - right)
        if step % 50 == 0:
            progress.set_postfix(loss=f"{output.loss.item():.3f}")
        if right >= until:
            break
    progress.close()
    return step + 1, right


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Save both in the form that `from_pretrained` reads."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
