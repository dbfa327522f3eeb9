"""A model is asked at the start how its rows can be scored: what it does decides, not what it is called."""

import copy
import random

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from trl.trainer.utils import add_fused_lm_head

from basis_rl.trainer import scoring_check
from basis_rl.trainer.packing import Method, Scorer, draws_random_numbers, enable_packing
from basis_rl.trainer.random_numbers import random_states
from basis_rl.trainer.scoring_check import Precision, agreed, check_positions, settled
from tests.support.architectures import WITHOUT_DROPOUT, small_model
from tests.support.tiny import config, tiny_trainer
from tests.trainer.test_packed_rows import NOISY, PADDED, REFUSED, row_by_row, small_rows

EXACT = [Precision.of(torch.float32)]
PROMPTS = [list(range(10, 45)), list(range(5, 41))]


def ask(model, rows=4, longest=None, **settings):
    """The method that a run of `model` with so many rows in a micro-batch finds."""
    if not isinstance(model, peft.PeftModel):
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    shape = {"gradient_accumulation_steps": 16, "steps_per_generation": 4}
    args = config("unused", per_device_train_batch_size=rows, **shape, **settings)
    return settled(model, enable_packing(model, args), args, PROMPTS, EXACT, longest)


def difference(model, method):
    """The greatest difference from the log-probabilities of rows alone; learnt prompts are left out."""
    ids, mask, scored = small_rows()
    labels = torch.where(scored.bool(), ids, -100)
    with torch.no_grad():
        found = Scorer(model, method)(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
        expected, _ = row_by_row(model, ids, mask, scored)
    return float((found - expected).abs().max())


# The method of the others is in the table of docs/packing.md (tests/docs), their scores in test_packed_rows.py.
@pytest.mark.parametrize("name", [*PADDED, *REFUSED, "OPT"])
def test_an_architecture_is_scored_as_rows_alone_or_refused_with_the_figure(name):
    model = small_model(name, dtype=torch.float32)
    if name in REFUSED:
        off = r"differ from those of \w+'s own forward pass by 0\.\d+ nats"
        with pytest.raises(ValueError, match="TRL's fused head" if name == "Llama 4" else off):
            ask(model)
        return
    method = ask(model)
    assert method.noisy == (name in NOISY)
    assert difference(model.eval(), method) < 1e-4


def test_rows_that_depend_on_their_neighbours_are_refused_with_the_way_out_and_scored_one_by_one():
    name = "DeepSeek-V3.2"
    with pytest.raises(
        ValueError, match="per_device_train_batch_size and per_device_eval_batch_size to 1, and gradient_ac"
    ):
        ask(small_model(name, dtype=torch.float32))
    assert str(ask(small_model(name, dtype=torch.float32), rows=1)) == "padded"
    with pytest.raises(ValueError, match="depends on its neighbours"):
        ask(small_model(name, dtype=torch.float32), rows=1, per_device_token_budget=100)


def test_a_head_that_is_not_the_models_own_has_no_way_out_and_is_refused_before_anything_is_generated(tmp_path):
    model = small_model("ModernBERT (decoder)", dtype=torch.float32, vocab_size=300)
    with pytest.raises(ValueError, match="for a single row too: TRL's fused head is not this model's head"):
        tiny_trainer(tmp_path, model=model, per_device_train_batch_size=1, steps_per_generation=4)


# What a configuration needs beyond its defaults to be built for the small model.
ADAPTERS = {
    "ADALORA": {"total_step": 10, "r": None},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 1, "target_modules": None},
    "C3A": {"block_size": 8}, "FOURIERFT": {"n_frequency": 10}, "OFT": {"r": None}, "ROAD": {"group_size": 16},
    "VBLORA": {"vector_length": 8}, "WAVEFT": {"n_frequency": 50},
    "TRAINABLE_TOKENS": {"token_indices": [5, 6], "target_modules": ["embed_tokens"]},
}  # fmt: skip
# Not kinds that TRL could train: they ask for task ids, for logits of the fused head, or for other adapters on a disk;
# a shadow's modules take no tensors.
WITHOUT = {"MULTITASK_PROMPT_TUNING", "POLY", "CPT", "XLORA", "SHADOW"}
# Its router averages over all tokens of the batch.
OF_THE_BATCH = {"LILY"}
GUESSED = {"target_modules": ["q_proj", "v_proj"], "r": 4, "num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}


def adapted(kind, **changes):
    """The small model with a new adapter of that kind."""
    names = kind.__dataclass_fields__
    settings = {name: value for name, value in (GUESSED | changes).items() if name in names and value is not None}
    model = small_model("Llama", dtype=torch.float32)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return peft.get_peft_model(model, kind(**settings)).train()


KINDS = {str(kind.value): cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}


@pytest.mark.parametrize("name", sorted(KINDS.keys() - WITHOUT))
def test_every_kind_of_adapter_is_scored_as_rows_alone_or_refused(name):
    model = adapted(KINDS[name], **ADAPTERS.get(name, {}))
    if name in OF_THE_BATCH:
        with pytest.raises(ValueError, match="depends on its neighbours"):
            ask(model)
        return
    method = ask(model)
    assert method.packed != model.peft_config["default"].is_prompt_learning
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter) * parameter.requires_grad)
    assert difference(model.eval(), method) < 1e-4


def test_an_activated_adapter_looks_at_its_row_and_is_not_packed_although_a_new_one_changes_nothing():
    model = adapted(peft.LoraConfig, alora_invocation_tokens=[30, 31])
    method = ask(model)
    assert str(method) == "padded"
    assert "a token's log-probability differs from that of its row alone by" in method.reason
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter) * parameter.requires_grad)
    assert difference(model.eval(), method) < 1e-4
    assert difference(model, Method(True, True, trimmed=True, positions=True)) < 1e-5, "its prompts do not invoke it"


def test_a_window_that_only_the_mask_knows_is_not_packed_where_rows_are_longer():
    windowed = {"sliding_window": 20, "attention_dropout": 0.0}
    model = small_model("PhiMoE", dtype=torch.float32, **windowed)
    method = ask(model)
    assert str(method) == "padded"
    assert model.config.sliding_window == 20
    assert difference(model.eval(), method) < 1e-4
    assert difference(model, Method(True, False, trimmed=True, positions=True)) > 0.1, "else nothing would be proven"
    assert str(ask(small_model("PhiMoE", dtype=torch.float32, **windowed), longest=20)) == "packed"
    # Wider than the rows by which the model is asked.
    wide = windowed | {"sliding_window": 100}
    assert str(ask(small_model("PhiMoE", dtype=torch.float32, **wide))) == "padded"
    assert str(ask(small_model("PhiMoE", dtype=torch.float32, **wide), longest=90)) == "packed"


def rope(kind, **changes):
    factors = {"long_factor": [4.0] * 4, "short_factor": [1.0] * 4} if kind == "longrope" else {}
    parameters = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        **factors,
    }
    return small_model(
        "Phi3" if kind == "longrope" else "Llama", dtype=torch.float32, rope_parameters=parameters, **changes
    )


def test_frequencies_that_follow_the_longest_row_are_refused_where_a_row_can_be_that_long():
    # Phi3 reads the length at which it changes from here.
    longrope = rope("longrope", original_max_position_embeddings=32)
    dynamic = rope("dynamic", max_position_embeddings=32)
    for model in (longrope, dynamic):
        check_positions(model, 32, batch_size=4)
        with pytest.raises(ValueError, match=r"rotary frequencies of model\.rotary_emb change with the longest row"):
            check_positions(model, 60, batch_size=4)
    # Alone, a row has its own frequencies; but dynamic ones also remember the rows before.
    check_positions(longrope, 60, batch_size=1)
    with pytest.raises(ValueError, match="rotary frequencies"):
        check_positions(dynamic, 60, batch_size=1)
    for kind in ("yarn", "linear"):
        check_positions(rope(kind), 60, batch_size=4)
    check_positions(small_model("Gemma3", dtype=torch.float32), 100, batch_size=4)


NOISE = {
    "functional dropout": ("OPT", {"layerdrop": 0.0}),
    "skipped layers": ("OPT", {"dropout": 0.0, "layerdrop": 0.5}),
    "a router's jitter": ("Mixtral", {"router_jitter_noise": 0.1}),
    "residual dropout": ("Seed-OSS", {"attention_dropout": 0.0}),
    "attention dropout": ("Qwen3", {"attention_dropout": 0.1}),
    "a random mixer": ("PhiMoE", {}),
}
SILENT = {
    "none": ("Qwen3", {}),
    "all turned off": ("GPT-2", WITHOUT_DROPOUT),
    "OPT without": ("OPT", {"dropout": 0.0, "layerdrop": 0.0, "attention_dropout": 0.0}),
}


@pytest.mark.parametrize("case", [*NOISE, *SILENT])
def test_noise_is_asked_of_the_generators(case):
    name, changes = (NOISE | SILENT)[case]
    model = small_model(name, dtype=torch.float32, **changes)
    model.lm_head.training = False
    modes = [module.training for module in model.modules()]
    states = random_states(torch.device("cpu"))
    assert draws_random_numbers(model) == (case in NOISE)
    assert [module.training for module in model.modules()] == modes
    assert random_states(torch.device("cpu")) == states
    assert str(enable_packing(model, config("unused"))) == ("packed" if case in NOISE else "shared")


def test_adapters_with_dropout_are_noisy():
    assert draws_random_numbers(adapted(peft.LoraConfig, lora_dropout=0.1))
    assert not draws_random_numbers(adapted(peft.LoraConfig))


def test_a_number_drawn_by_python_is_seen():
    before = random_states(torch.device("cpu"))
    random.random()
    assert random_states(torch.device("cpu")) != before


def test_asking_leaves_no_trace():
    model = adapted(peft.LoraConfig)
    model.base_model.model.config.sliding_window = 50
    before = copy.deepcopy(model.state_dict())
    states = random_states(torch.device("cpu"))
    modes = [module.training for module in model.modules()]
    ask(model)
    assert random_states(torch.device("cpu")) == states
    assert [module.training for module in model.modules()] == modes
    assert model.base_model.model.config.sliding_window == 50
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def padded_router_loss(model, ids, mask, labels):
    output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, output_router_logits=True)
    return output.aux_loss


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "GPT-OSS", "Qwen3-Next", "MiniMax-M2"])
@pytest.mark.parametrize("method", ["shared", "packed"])
def test_the_routers_loss_of_packed_rows_is_that_of_their_real_tokens(name, method):
    """Of the rows that are scored; as TRL computes it of padded ones, in which it leaves out the padding."""
    model = small_model(name, dtype=torch.float32).eval()
    ids, mask, scored = small_rows("a deep tree")
    kept = scored.any(dim=1)
    ids, mask, scored = ids[kept], mask[kept], scored[kept]
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    labels = torch.where(scored.bool(), ids, -100)
    found = enable_packing(model, config("unused"))
    assert found.packed
    chosen = Method(True, method == "shared", trimmed=True, positions=True)
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels, "fused_lm_head": True}
    output = Scorer(model, chosen)(**given, output_router_logits=True)
    # A loop over single rows: sums over their tokens.
    expected = padded_router_loss(model, *_left_aligned(ids, mask, labels))
    torch.testing.assert_close(output.aux_loss, expected, rtol=1e-5, atol=0)
    gradients = []
    for loss in (output.aux_loss, expected):
        model.zero_grad()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert gradients[1].norm() > 0
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[1].norm()


def _left_aligned(ids, mask, labels):
    order = mask.argsort(dim=1, descending=True, stable=True)
    return (each.gather(1, order) for each in (ids, mask, labels))


def test_a_micro_batch_without_a_score_has_a_routers_loss_of_zero():
    model = small_model("Mixtral", dtype=torch.float32).eval()
    ids, mask, _ = small_rows()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    given = {"input_ids": ids, "attention_mask": mask, "labels": torch.full_like(ids, -100), "fused_lm_head": True}
    enable_packing(model, config("unused"))
    loss = Scorer(model, Method(True, True, trimmed=True, positions=True))(**given, output_router_logits=True).aux_loss
    assert loss == 0
    loss.backward()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())


def test_the_budget_is_refused_with_a_routers_loss_and_with_images(tmp_path):
    mixture = small_model("Mixtral", dtype=torch.float32, vocab_size=300)
    with pytest.raises(ValueError, match="does not work with router_aux_loss_coef"):
        tiny_trainer(tmp_path, model=mixture, per_device_token_budget=100)
    tiny_trainer(tmp_path, model=mixture, per_device_token_budget=100, router_aux_loss_coef=0.0)


def test_precision_is_that_of_tf32_where_torch_does_not_say(monkeypatch):
    def refuses():
        raise RuntimeError("mix of the legacy and new APIs")

    assert Precision.of(torch.float32).rounding == 1e-4
    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    assert Precision.of(torch.float32).rounding == Precision.of(torch.bfloat16).rounding == 0.2


def test_ranks_agree_on_the_most_careful_method_or_on_the_error(monkeypatch):
    found = [Method(True, True, True, True), Method(False, False, True, True, "off"), Method(True, False, True, True)]
    of_all = [(each, "") for each in found]
    monkeypatch.setattr(scoring_check, "gather_object", lambda mine: [*of_all, *mine])
    assert agreed(lambda: found[0]) == found[1]
    of_all.append((None, "another rank's model is off"))
    with pytest.raises(ValueError, match="another rank's model is off"):
        agreed(lambda: found[0])
