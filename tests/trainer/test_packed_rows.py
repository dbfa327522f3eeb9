"""Rows scored without padding: as a plain loop over single rows, whatever the model, objective, baseline or wrapper."""

import json
import math
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.trainer.utils import add_fused_lm_head

from basis_rl.functional.objectives import importance_weights
from basis_rl.functional.packing import pack_rows
from basis_rl.run.errors import RewardFailed
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer import attention as attention_of
from basis_rl.trainer.attention import attention_name, let_through_packed_rows
from basis_rl.trainer.packing import Method, Scorer, enable_packing, reordered
from tests.functional.test_pack_rows import EVERY, given, rows_of, visible
from tests.support.architectures import ARCHITECTURES, VOCABULARY, WITHOUT_DROPOUT, small_model
from tests.support.kernels import Varlen
from tests.support.tiny import DEVICE, config, tiny_model, tiny_trainer

# What the table of docs/packing.md says of the others.
PADDED = ("Mamba", "RWKV", "Bloom")
REFUSED = ("Llama 4", "DeepSeek-V3.2", "ModernBERT (decoder)")
NOISY = ("Seed-OSS", "OPT", "GPT-2", "PhiMoE")
PACKED = [name for name in ARCHITECTURES if name not in (*PADDED, *REFUSED)]
IN_FLOAT32 = ("DeepSeek-V3", "GLM-4.5", "MiniMax-M2", "Nemotron-H")
EAGER_TOO = ("Llama", "Gemma3", "GPT-2", "Mixtral", "Qwen3-Next")
# Except on a CPU, TRL's own head computes scores, in float32.
EXACT = 1e-12 if DEVICE == "cpu" else 1e-5
# Of two levels, and of eight; of some models' windows, the second has segments that are shorter.
SHAPES = ("groups below a system message", "a deep tree")


def small_rows(case="groups below a system message"):
    ids, mask, scored = (each.to(DEVICE) for each in rows_of(case))
    # With padding, TRL's head would also score a first token if it had a label.
    scored = scored * (mask.cumsum(dim=1) > 1)
    return ids % (VOCABULARY - 3) + 3, mask, scored


def row_by_row(model, ids, mask, scored):
    """Log-probabilities and entropies ``(B, L - 1)`` of scored tokens from the model's plain forward of single rows."""
    wide = torch.promote_types(model.dtype, torch.float32)
    # Learnt prompts, which have logits as well, are left out.
    found = torch.zeros(2, ids.shape[0], ids.shape[1] - 1, dtype=wide, device=ids.device)
    for row in range(len(ids)):
        columns = mask[row].nonzero()[:, 0]
        wanted = scored[row, columns[1:]].bool()
        if not wanted.any():
            continue
        logits = model(input_ids=ids[row, columns][None], use_cache=False).logits[0, -len(columns) : -1].to(wide)
        log_probs = logits.log_softmax(dim=-1)
        of_token = log_probs.gather(1, ids[row, columns[1:]][:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        found[:, row, columns[1:][wanted] - 1] = torch.stack([of_token, entropy])[:, wanted]
    return found[0], found[1]


def scores(model, ids, mask, scored, **settings):
    """The same from one call as TRL makes it, and the method."""
    method = enable_packing(model, config("unused", **settings))
    labels = torch.where(scored.bool(), ids, -100)
    output = Scorer(model, method)(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    wide = torch.promote_types(model.dtype, torch.float32)
    return output.log_probs.to(wide), output.entropy.to(wide), method


def gradients(model, log_probs, entropy):
    weights = torch.linspace(-1, 1, log_probs.numel()).to(log_probs).view_as(log_probs)
    model.zero_grad()
    (log_probs * weights + 0.3 * entropy * weights.square()).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


def assert_scores_and_gradients(model, expected, exact):
    """`expected`: by rows their scores and the gradient."""
    for rows, of_rows, gradient in expected:
        *found, method = scores(model, *rows)
        for ours, theirs in zip(found, of_rows, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=EXACT if exact else max(EXACT, 1e-6))
        assert error(gradients(model, *found), gradient) < (1e-6 if exact else 1e-4)
    return str(method)


KERNEL_TOO = ("Llama", "Mistral", "Qwen2", "Gemma3", "Granite", "GPT-2", "Phi3")
WAYS = [(name, None) for name in PACKED] + [(name, "eager") for name in EAGER_TOO]


@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_architectures_give_the_scores_of_single_rows(name, attention, monkeypatch):
    """Each segment alone, all in one padded call, and by the kernel of a GPU."""
    model = small_model(name, attention)
    if name in NOISY:
        model.eval()
    single = [(rows, row_by_row(model, *rows)) for rows in map(small_rows, SHAPES)]
    expected = [(rows, of_rows, gradients(model, *of_rows)) for rows, of_rows in single]
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    # Eager attention has its softmax in float32, and parts of some models compute in it whatever their weights are.
    exact = attention_name(model) != "eager" and name not in IN_FLOAT32
    for short in (10**9, 0):
        monkeypatch.setattr(attention_of, "SHORT", short)
        assert assert_scores_and_gradients(model, expected, exact) == ("packed" if name in NOISY else "shared")
    if attention is None and name in KERNEL_TOO and attention_of.varlen_attn is not None:
        kernel = Varlen(attention_of.varlen_attn, types=(torch.float64,))
        monkeypatch.setattr(attention_of, "varlen_attn", kernel)
        monkeypatch.setattr(attention_of, "_has_varlen", lambda *tensors: True)
        assert_scores_and_gradients(model, expected, exact)
        assert kernel.calls


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3"])
def test_in_16_bits_packed_rows_are_as_exact_as_single_ones(name):
    """Short rows go through another kernel then."""
    model = small_model(name, "sdpa", dtype=torch.float32)
    rows = small_rows()

    def errors(found):
        with_gradient = [*(each.detach() for each in found), gradients(model, *found)]
        return [error(each, right) for each, right in zip(with_gradient, exact, strict=True)]

    exact = [*(each.detach() for each in row_by_row(model, *rows)), gradients(model, *row_by_row(model, *rows))]
    with torch.autocast(DEVICE, torch.bfloat16):
        single = row_by_row(model, *rows)
    of_single = errors(single)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    with torch.autocast(DEVICE, torch.bfloat16):
        *packed, _ = scores(model, *rows)
    for ours, theirs in zip(errors(packed), of_single, strict=True):
        assert 0 < ours < 1.5 * theirs


@pytest.mark.parametrize("window", [None, 1, 3, 6, 25])
@pytest.mark.parametrize("case", ["groups below a system message", "turns in common", "a deep tree", "random"])
def test_a_token_sees_the_last_ones_of_its_row_within_the_window(case, window):
    """In the padded batch of all segments, and in each segment by itself."""
    for rows in given(case):
        packing = pack_rows(*rows, share=True)
        expected = {at: seen[-(window or len(seen)) :] for at, seen in visible(packing).items()}
        layout = attention_of.Layout.of(packing.segments[None, None])
        batch = attention_of._batch(layout, window, None, torch.device("cpu"))
        queries, keys = (places.unflatten(0, (len(batch.real), -1)) for places in (batch.queries, batch.keys))
        found = {
            int(queries[segment, query]): keys[segment, batch.mask[segment, 0, query]].tolist()
            for segment, query in batch.real.nonzero().tolist()
        }
        assert found == expected
        masks = attention_of._masks(layout, window, None, torch.device("cpu"))
        found = {}
        for span, spans, mask in zip(layout.queries, layout.keys, masks, strict=True):
            path = torch.tensor([at for each in spans for at in range(each.start, each.stop)])
            seen = torch.ones(len(path), len(path)).tril().bool() if mask is None else mask[0, 0]
            found |= {at: path[own].tolist() for at, own in zip(range(span.start, span.stop), seen, strict=True)}
        assert found == expected


@pytest.mark.parametrize("packed", [True, False])
def test_columns_of_padding_alone_are_not_computed_and_what_is_found_comes_back_to_its_columns(packed):
    """Scores and hidden states; without packing too."""
    model = small_model("Qwen3")
    ids, mask, scored = (torch.nn.functional.pad(each, (5, 3)) for each in small_rows())
    expected = row_by_row(model, ids, mask, scored)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    seen = []
    model.model.register_forward_hook(lambda *given: seen.append(given[2].last_hidden_state.detach()))
    let_through_packed_rows(model)
    scorer = Scorer(model, Method(packed, packed, trimmed=True, positions=True))
    labels = torch.where(scored.bool(), ids, -100)
    output = scorer(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    assert seen[0].shape[:2] == (len(ids), mask.sum(dim=1).max()) or packed
    for ours, theirs in zip((output.log_probs, output.entropy), expected, strict=True):
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=0, atol=EXACT)
    found = scorer.before_tokens(seen[0])
    assert found.shape[:2] == expected[0].shape
    for row in range(len(ids)):
        columns = mask[row].nonzero()[:, 0]
        hidden = model.model(input_ids=ids[row, columns][None]).last_hidden_state[0, :-1]
        wanted = scored[row, columns[1:]].bool()
        torch.testing.assert_close(found[row, columns[1:][wanted] - 1], hidden[wanted], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", EVERY)
def test_every_shape_of_a_micro_batch(case):
    model = small_model("Qwen3")
    rows = small_rows(case)
    expected = row_by_row(model, *rows)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    for packing in ("auto", "none"):
        *found, method = scores(model, *rows, packing=packing)
        assert method.packed == (packing == "auto")
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)  # rotary positions are shifted by padding
        found[0].sum().backward()  # a differentiable zero where nothing is scored


def test_a_table_of_positions_is_read_from_the_mask_on_every_path():
    model = small_model("GPT-2", **WITHOUT_DROPOUT)
    rows = small_rows()
    expected = row_by_row(model, *rows)[0]
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    for packing in ("auto", "none"):
        torch.testing.assert_close(scores(model, *rows, packing=packing)[0], expected, rtol=0, atol=1e-6)
    labels = torch.where(rows[2].bool(), rows[0], -100)
    without = model(input_ids=rows[0], attention_mask=rows[1], labels=labels, fused_lm_head=True).log_probs
    assert (without - expected).abs().max() > 1e-2, "else the test would prove nothing"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_calls_with_a_mask_are_those_of_before(attention, tmp_path):
    model = small_model("Qwen3", attention, torch.float32).eval()
    ids, mask, scored = small_rows()
    chosen = {"input_ids": ids, "attention_mask": mask}
    before = model(**chosen).logits
    prompt = {"input_ids": ids[:, :40], "attention_mask": mask[:, :40]}
    generated = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    scores(model, ids, mask, scored)
    assert torch.equal(model(**chosen).logits, before)
    assert torch.equal(model.generate(**prompt, max_new_tokens=5, do_sample=False), generated)
    assert model.config._attn_implementation == attention
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "basis" not in json.dumps(saved)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).to(DEVICE)
    torch.testing.assert_close(again(**chosen).logits, before)


def test_lora_is_packed_and_learnt_prompts_are_not():
    peft = pytest.importorskip("peft")
    rows = small_rows()
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    base = small_model("Qwen3")
    add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    model = peft.get_peft_model(base, lora)
    *found, method = scores(model, *rows)
    assert str(method) == "shared"
    expected = row_by_row(model, *rows)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=EXACT)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    learnt = enable_packing(peft.get_peft_model(small_model("Qwen3"), prompts), config("unused"))
    assert not learnt.packed
    assert "prompts" in learnt.reason


@pytest.mark.parametrize("setting", ["torch_compile", "of_a_user"])
def test_a_setting_that_packing_does_not_know_falls_back(setting):
    model = small_model("Qwen3")
    args = config("unused")
    assert enable_packing(model, args).packed
    if setting == "torch_compile":
        args.torch_compile = True
    else:
        ALL_ATTENTION_FUNCTIONS.register(setting, sdpa_attention_forward)
        model.config._attn_implementation = setting
    method = enable_packing(model, args)
    assert not method.packed
    assert setting in method.reason


def micro_batch(rows, advantages, old):
    ids, mask, scored = rows
    tokens = int((scored.any(dim=0)).sum())
    return {
        "prompt_ids": ids[:, :-tokens], "prompt_mask": mask[:, :-tokens], "advantages": advantages,
        "completion_ids": ids[:, -tokens:], "completion_mask": scored[:, -tokens:],
        "num_items_in_batch": scored.sum(), "old_per_token_logps": old,
    }  # fmt: skip


class RowByRow(BasisTrainer):
    """Scores rollouts by a plain loop."""

    def _get_per_token_logps_and_entropies(self, model, ids, mask, tokens, **kwargs):
        scored = mask.clone()
        scored[:, :-tokens] = 0
        found = [each[:, -tokens:] for each in row_by_row(model, ids, mask, scored)]
        if self._scored is not None:
            self._scored.append(tuple(found))
        return found[0], found[1], None


# One of TRL's, of ratios of a rollout, of ours, and one that looks at all tokens of the micro-batch.
@pytest.mark.parametrize("objective", ["dapo", "gspo", "gmpo", "kl_cov"])
def test_an_objective_has_the_loss_of_single_rows(objective, tmp_path):
    rows = small_rows()
    tokens = int(rows[2].any(dim=0).sum())
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(len(rows[0]), generator=generator, dtype=torch.float64).to(DEVICE)
    noise = 0.3 * torch.randn(len(rows[0]), tokens, generator=generator, dtype=torch.float64).to(DEVICE)
    found = {}
    for method in ("single", "shared", "packed", "padded"):
        cls = RowByRow if method == "single" else BasisTrainer
        settings = {"packing": "none" if method == "padded" else "auto"}
        trainer = tiny_trainer(tmp_path, "rloo", cls, objective=objective, model=small_model("Qwen3"), **settings)
        trainer.model.double().train()
        trainer.current_gradient_accumulation_steps = 1
        if method == "packed":
            trainer.packing = replace(trainer.packing, shared=False)
        if method == "single":
            with torch.no_grad():
                old = row_by_row(trainer.model, *rows)[0][:, -tokens:] + noise
        loss = trainer.compute_loss(trainer.model, micro_batch(rows, advantages, old))
        loss.backward()
        found[method] = loss.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    expected, expected_gradient = found.pop("single")
    assert expected_gradient.norm() > 0
    for method, (loss, gradient) in found.items():
        tolerance = 1e-5 if method == "padded" or DEVICE != "cpu" else 1e-7
        assert abs(loss - expected) <= tolerance * abs(expected).clamp(min=1e-3)
        assert error(gradient, expected_gradient) < 10 * tolerance


RUNS = {
    "energies": {"baseline": "otb"},
    "a critic on hidden states": {"baseline": "ppo"},
    "remax": {"baseline": "remax"},
    "KL in the reward": {"baseline": "reinforce_pp", "beta": 0.1, "kl_placement": "reward"},
    "KL in the loss, several passes": {"baseline": "grpo", "beta": 0.1, "num_iterations": 2},
    "high entropy": {"baseline": "grpo", "top_entropy_quantile": 0.5},
    "own objective": {"baseline": "rloo", "objective": "gpg"},
    "cut off": {"baseline": "rloo", "mask_truncated_completions": True},
    "checkpointing": {"baseline": "rloo", "gradient_checkpointing": True},
    "reentrant checkpointing": {
        "baseline": "rloo", "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "nothing scored": {"baseline": "rloo", "reward_funcs": lambda completions, **_: [None] * len(completions)},
}  # fmt: skip


# Logged of how long a step took, or of how many tokens went through the model.
OF_THE_WAY = ("time/", "seconds", "step_time", "tokens_per_second", "tokens/computed")


class Ragged(BasisTrainer):
    """Its rollouts end at different places."""

    def _generate_single_turn(self, *args, **kwargs):
        ids, log_probs = super()._generate_single_turn(*args, **kwargs)
        return [each[: 1 + sum(each) % len(each)] for each in ids], log_probs


@pytest.mark.parametrize("run", RUNS)
def test_runs_are_the_same_with_and_without_padding(run, tmp_path, tiny_path):
    """All that they log too, although rows have moved. Adam would turn rounding errors in gradients that are all but 0
    into steps as long as any."""
    logs, weights = [], []
    for packing in ("none", "auto"):
        trainer = tiny_trainer(
            tmp_path / packing, cls=Ragged, model=tiny_path, packing=packing, gradient_accumulation_steps=2,
            per_device_train_batch_size=4,
            steps_per_generation=4, max_steps=4, max_completion_length=12, optim="sgd", learning_rate=0.3, **RUNS[run],
        )  # fmt: skip
        assert trainer.packing.packed == (packing == "auto")
        # How a run ends in which nothing is scored.
        with suppress(RewardFailed):
            trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
        weights.append(torch.cat([p.detach().flatten().cpu() for p in trainer.model.parameters()]))
    moved = torch.cat([p.detach().flatten() for p in tiny_model().parameters()])
    assert run in ("nothing scored", "cut off") or (weights[0] - moved).abs().max() > 1e-3
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-5)
    for padded, packed in zip(*logs, strict=True):
        assert packed.keys() == padded.keys()
        for name in padded:
            if padded[name] is None:
                assert packed[name] is None
            elif not name.startswith(OF_THE_WAY):
                assert packed[name] == pytest.approx(padded[name], abs=1e-5, rel=1e-4, nan_ok=True), name


def test_rows_move_within_their_step_and_keep_what_belongs_to_them():
    rows = torch.arange(24)
    lengths = torch.randint(1, 9, (24,), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9)[None] < lengths[:, None]).long()
    whole = {
        "prompt_ids": (rows % 6)[:, None].repeat(1, 4), "prompt_mask": torch.ones(24, 4, dtype=torch.int64),
        "completion_ids": rows[:, None].repeat(1, 9), "completion_mask": mask, "advantages": rows.double(),
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    batches = [
        {name: value[at : at + 4] if value.ndim else value for name, value in whole.items()} for at in range(0, 24, 4)
    ]
    found = reordered(batches, 3, shared=True)
    assert [len(batch["advantages"]) for batch in found] == [4] * 6
    for begin in (0, 3):
        moved = torch.cat([batch["advantages"] for batch in found[begin : begin + 3]])
        assert sorted(moved.tolist()) == list(range(4 * begin, 4 * begin + 12))
    for batch in found:
        numbers = batch["advantages"].long()
        assert torch.equal(batch["completion_ids"][:, 0], numbers)
        assert torch.equal(batch["prompt_ids"][:, 0], numbers % 6)
        assert torch.equal(batch["completion_mask"], mask[numbers])
        assert int(batch["num_items_in_batch"]) == int(mask.sum())
        assert len(set(batch["prompt_ids"][:, 0].tolist())) == 2, "pairs of one prompt stay together"
    apart = reordered(batches, 3, shared=False)
    assert max(len(set(batch["prompt_ids"][:, 0].tolist())) for batch in apart) > 2


def test_images_keep_the_positions_that_their_model_counts():
    """Qwen-VL's positions of images have three dimensions."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [0]}
    text = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    text |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    tokens = {"vision_start_token_id": 58, "vision_end_token_id": 59, "image_token_id": 60, "video_token_id": 61}
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens))
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids = torch.randint(3, 57, (1, 40))
    ids[:, 5:23] = torch.tensor([58, *[60] * 16, 59])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == 60).long()}
    given |= {"pixel_values": torch.randn(64, 96), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    given |= {"labels": torch.where(torch.arange(40) < 28, -100, ids), "fused_lm_head": True}
    expected = model(**given).log_probs
    found = Scorer(model, enable_packing(model, config("unused")))(**given).log_probs
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


BOUNDED = [
    (mode, bounds)
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    for bounds in ((None, 1.3), (0.8, None), (0.8, 1.3))
]
REJECTED = [(mode, given) for mode in ("seq_mean_k1", "seq_mask_tis") for given in ((None, 1.02), (0.97, 1.05))]
REJECTED += [("seq_mean_k3", (None, 0.04)), ("seq_mean_k3", (0.01, 0.04))]


def plain_weights(mode, ratios, tokens, lowest, highest):
    """Of the tokens of a rollout, by the ratios of those that are known."""

    def bounded(ratio):
        if lowest <= ratio <= highest:
            return ratio
        return min(max(ratio, lowest), highest) if "truncate" in mode else 0.0

    if mode.startswith("token"):
        return [bounded(ratios.get(t, 1.0)) for t in range(tokens)]
    if mode.startswith("sequence"):
        return [bounded(math.prod(ratios.values()))] * tokens
    statistic = math.prod(ratios.values()) ** (1 / max(1, len(ratios)))
    if mode == "seq_mean_k3":
        statistic = sum(ratio - 1 - math.log(ratio) for ratio in ratios.values()) / max(1, len(ratios))
    inside = lowest <= statistic <= highest
    return [inside * (ratios.get(t, 1.0) if mode == "seq_mask_tis" else 1.0) for t in range(tokens)]


@pytest.mark.parametrize(("mode", "bounds"), BOUNDED + REJECTED)
def test_weights_are_bounded_ratios_or_those_of_rollouts_that_are_not_rejected(mode, bounds):
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(40, 7, generator=generator).double()
    sampled = log_probs + 0.3 * torch.randn(40, 7, generator=generator).double()
    sampled[1, 2] = sampled[3] = float("nan")
    mask = (torch.rand(40, 7, generator=generator) < 0.7).long()
    mask[5] = 0
    found = importance_weights(log_probs, sampled, mask, mode, *bounds).expand(40, 7)
    kept = 0
    for row in range(40):
        ratios = {t: math.exp(log_probs[row, t] - sampled[row, t]) for t in range(7) if mask[row, t]}
        ratios = {t: ratio for t, ratio in ratios.items() if not math.isnan(ratio)}
        expected = plain_weights(mode, ratios, 7, bounds[0] or 0.0, bounds[1] or math.inf)
        assert found[row].tolist() == pytest.approx(expected, rel=1e-5)
        kept += any(expected)
    assert 5 < kept < 35 or (mode, bounds) not in REJECTED


def test_the_engine_as_the_old_policy_leaves_no_weights():
    log_probs, sampled, mask = torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3)
    assert importance_weights(log_probs, sampled, mask, "bypass", 2.0, 3.0).tolist() == [[1.0]] * 2
