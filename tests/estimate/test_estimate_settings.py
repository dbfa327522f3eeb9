"""What a run's settings and its launch make of the estimate: each switch by hand, on sizes that are easily reckoned."""

import dataclasses
import json
import re

import pytest
import yaml
from transformers import MixtralConfig, Qwen2MoeConfig, Qwen3Config
from trl import ModelConfig

from basis_rl.baselines import build_baseline
from basis_rl.estimate.footprint import Launch, asked, model_size, planned, read_launch, setting_of
from basis_rl.estimate.memory import (
    MAX_LIVE_PARAMETERS,
    REDUCE_BUCKET,
    Setting,
    backward_parts,
    generation_parts,
    static_parts,
    step_parts,
)
from basis_rl.estimate.report import Footprint, arithmetic, disk, optimizer_steps
from tests.estimate.test_memory import SIZE, named
from tests.support.tiny import config

LORA = dataclasses.replace(SIZE, parameters=1100, trainable=100)
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": False,
}


def deepspeed(stage=3, world=4, **settings):
    return Setting(engine="deepspeed", stage=stage, world=world, low=2, **settings)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (deepspeed(stage=2, reference=True), 2000),
        (deepspeed(stage=3, reference=True), 500),
        (deepspeed(stage=2, reference=True, offload_parameters=True), 2000),
        (deepspeed(stage=3, reference=True, offload_parameters=True), None),
        (Setting(engine="fsdp", world=4, low=2, reference=True, offload_parameters=True, offload_optimizer=True), None),
        (Setting(engine="fsdp", world=4, low=2, frozen_bytes=2, reference=True), 500),
        (Setting(world=4, frozen_bytes=2, reference=True), 2000),
    ],
)
def test_a_reference_model_is_divided_as_the_policys_weights_are(setting, expected):
    parts = named(static_parts(SIZE, setting))
    assert parts.get("reference model") == expected
    assert ("weights" in parts) == (expected is not None)
    on_cpu = setting.engine == "fsdp" and expected is None
    assert {"gradients", "optimizer: moments"}.isdisjoint(parts) == on_cpu


def test_deepspeeds_buckets_and_what_it_gathers():
    bucket, gathered = "DeepSpeed's bucket of gradients", "gathered parameters"
    parts = named(backward_parts(SIZE, deepspeed(completion=1)))
    assert (parts[bucket], parts[gathered]) == (2 * REDUCE_BUCKET, 2 * 1000)
    large = dataclasses.replace(SIZE, parameters=10 * MAX_LIVE_PARAMETERS, trainable=10 * MAX_LIVE_PARAMETERS)
    assert named(backward_parts(large, deepspeed(completion=1)))[gathered] == 2 * MAX_LIVE_PARAMETERS
    two = named(backward_parts(SIZE, deepspeed(stage=2, completion=1)))
    assert two[bucket] == 2 * REDUCE_BUCKET
    assert gathered not in two
    assert bucket not in named(backward_parts(SIZE, Setting(completion=1)))


def test_deepspeeds_step_turns_gradients_to_float32_a_group_at_a_time():
    assert named(step_parts(SIZE, deepspeed())) == {"float32 gradients": 4 * 250}
    assert step_parts(SIZE, deepspeed(offload_optimizer=True)) == []
    assert step_parts(SIZE, dataclasses.replace(deepspeed(), low=0)) == []
    assert step_parts(SIZE, Setting(low=2)) == []
    large = dataclasses.replace(SIZE, parameters=8 * 10**9, trainable=8 * 10**9)
    assert named(step_parts(large, deepspeed(world=2)))["float32 gradients"] == 4 * 10**9
    assert named(step_parts(large, deepspeed(stage=2, world=2)))["float32 gradients"] == 16 * 10**9


def test_what_generation_holds_beside_its_cache():
    gathered, copies = "all parameters, gathered", "autocast's copies of the weights"
    assert named(generation_parts(SIZE, deepspeed(generated=2)))[gathered] == 2000
    assert gathered not in named(generation_parts(SIZE, deepspeed(generated=2, gather_to_generate=False)))
    assert gathered not in named(generation_parts(SIZE, deepspeed(stage=2, generated=2)))
    autocast = Setting(low=2, generated=2)
    assert named(generation_parts(SIZE, autocast))[copies] == 2 * (900 + 50 * 8)
    assert named(generation_parts(LORA, autocast))[copies] == 2 * 300, "those of a layer at a time"
    assert copies not in named(generation_parts(SIZE, Setting(generated=2)))


def setting(tmp_path, model=None, launch=None, model_config=None, **settings):
    model = ModelConfig(model_name_or_path="m", **(model or {}))
    args = config(tmp_path, **settings)
    return setting_of(args, model, model_config or Qwen3Config(**SHAPE), launch or Launch(), 7)


def test_settings_and_precisions_of_a_run(tmp_path):
    found = setting(tmp_path, beta=0.1, gradient_checkpointing=True)
    assert (found.low, found.frozen_bytes, found.trainable_bytes, found.reference) == (0, 4, 4, True)
    assert (found.rows, found.prompt, found.completion, found.generated) == (8, 7, 6, 16)
    assert (found.attention, found.checkpointing, found.optimizer_states) == ("sdpa", True, 2.0)
    args = config(tmp_path)
    args.use_vllm = True
    assert setting_of(args, ModelConfig(), Qwen3Config(**SHAPE), Launch(), 7).generated == 0
    assert not setting(tmp_path).reference
    assert not setting(tmp_path, {"use_peft": True}, beta=0.1).reference, "the policy without its adapter"
    assert setting(tmp_path, bf16=True).low == 2
    with planned(Launch()):
        args = config(tmp_path)
    args.fp16 = True
    assert setting_of(args, ModelConfig(), Qwen3Config(**SHAPE), Launch(), 7).low == 2
    half = setting(tmp_path, {"dtype": "bfloat16"})
    assert (half.frozen_bytes, half.trainable_bytes) == (2, 2)
    lora = setting(tmp_path, {"dtype": "bfloat16", "use_peft": True})
    assert (lora.frozen_bytes, lora.trainable_bytes) == (2, 4)
    stored = Qwen3Config(**SHAPE, dtype="bfloat16")
    assert setting(tmp_path, {"dtype": "float32"}, model_config=stored).frozen_bytes == 4
    assert setting(tmp_path, {"attn_implementation": "eager"}).attention == "eager"


def test_the_estimate_asks_the_trainer_how_rows_are_scored(tmp_path):
    def found(**settings):
        each = setting(tmp_path, **settings)
        return each.scoring, each.cpu, each.compact_head

    assert found() == ("shared", True, True)
    assert found(packing="none") == ("padded", True, False)
    assert found(model={"attn_implementation": "flex_attention"}) == ("padded", True, True)
    assert found(model={"attn_implementation": "flash_attention_2"}) == ("shared", True, True)
    assert found(model_config=Qwen3Config(**SHAPE, attention_dropout=0.1)) == ("packed", True, True)
    with planned(Launch()):
        assert found(use_cpu=False) == ("shared", False, False)


def test_sizes_are_those_of_the_built_model():
    size = model_size(Qwen3Config(**SHAPE), ModelConfig(model_name_or_path="m"))
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 48  # projections of queries, keys and values, output, MLP
    assert size.layer_matrices == 2 * layer
    assert size.parameters == size.trainable == 2 * (layer + 2 * 16 + 2 * 4) + 16 + 2 * 64 * 16
    assert (size.query, size.key_value, size.heads, size.qk_norm) == (16, 8, 4, True)
    adapters = ModelConfig(model_name_or_path="m", use_peft=True, lora_r=4, lora_target_modules=["q_proj", "v_proj"])
    lora = model_size(Qwen3Config(**SHAPE), adapters)
    assert lora.trainable == 2 * (4 * 16 + 4 * 16 + 4 * 16 + 4 * 8)
    assert lora.parameters == size.parameters + lora.trainable


def test_mixtures_of_experts_are_refused_whatever_their_number_is_called():
    few = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 2}
    for experts in (Qwen2MoeConfig(**SHAPE, **few), MixtralConfig(**SHAPE, num_local_experts=2)):
        with pytest.raises(ValueError, match="dense decoders"):
            model_size(experts, ModelConfig(model_name_or_path="m"))


def write(tmp_path, **settings):
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", "num_machines": 1, **settings}))
    return str(path)


def test_a_launch_is_read_from_accelerates_file(tmp_path):
    zero = {"zero_stage": 2, "offload_optimizer_device": "cpu", "offload_param_device": "none"}
    path = write(tmp_path, distributed_type="DEEPSPEED", num_processes=4, deepspeed_config=zero)
    found = read_launch(path)
    assert (found.engine, found.stage, found.world) == ("deepspeed", 2, 4)
    assert (found.offload_optimizer, found.offload_parameters) == (True, False)
    assert str(found) == f"DeepSpeed ZeRO-2 on 4 process(es), from {path}"
    assert read_launch(path, world_size=16).world == 16
    with pytest.raises(ValueError, match="at least 1, got 0"):
        read_launch(path, world_size=0)
    with pytest.raises(ValueError, match="There is no configuration of accelerate"):
        read_launch(str(tmp_path / "none.yaml"))
    for given, offload in ((False, False), (True, True), ("true", True)):
        settings = {"fsdp_version": 2, "fsdp_offload_params": given}
        found = read_launch(write(tmp_path, distributed_type="FSDP", num_processes=2, fsdp_config=settings))
        assert (found.engine, found.offload_optimizer, found.offload_parameters) == ("fsdp", offload, offload)
    plain = read_launch(write(tmp_path, distributed_type="MULTI_GPU", num_processes=2))
    assert str(plain).startswith("DDP on 2")


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 3, "offload_param": {"device": "cpu"}}, (3, False, True)),
        ({"offload_optimizer": {"device": "none"}}, (0, False, False)),
    ],
)
def test_a_file_of_deepspeeds_own_goes_before_accelerates(zero, expected, tmp_path):
    own = tmp_path / "zero.json"
    own.write_text(json.dumps({"zero_optimization": zero}))
    settings = {"deepspeed_config_file": str(own), "zero_stage": 2}
    found = read_launch(write(tmp_path, distributed_type="DEEPSPEED", num_processes=2, deepspeed_config=settings))
    assert (found.stage, found.offload_optimizer, found.offload_parameters) == expected


def test_a_launch_is_read_from_the_environment(monkeypatch):
    for name in ("WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    assert read_launch() == Launch()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (read_launch().engine, read_launch().world) == ("plain", 2)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert (read_launch().engine, read_launch().offload_parameters) == ("fsdp", False)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert read_launch().offload_parameters
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    found = read_launch()
    assert (found.engine, found.stage) == ("deepspeed", 3)
    assert (found.offload_optimizer, found.offload_parameters) == (False, True)


@pytest.mark.parametrize(("accumulated", "steps", "batches"), [(4, 5, "9"), (2, 8, "8"), (1, 15, "7.5")])
def test_an_epoch_ends_with_a_step_of_what_is_left(accumulated, steps, batches, tmp_path):
    """Half as many epochs again over 5 generation batches of 2 micro-batches; transformers rounds up twice."""
    epochs = {"max_steps": -1, "num_train_epochs": 1.5, "gradient_accumulation_steps": accumulated}
    args = config(tmp_path, steps_per_generation=2, **epochs)
    assert optimizer_steps(args, 21) == steps
    said = arithmetic(args, 21, lambda text: None)
    assert f"The run: {steps} optimizer steps = {batches} generation batches" in said


def test_checkpoints_hold_what_a_run_would_write(tmp_path, monkeypatch):
    monkeypatch.setattr("basis_rl.estimate.report.GIB", 1)

    def found(baseline="batch_mean", free=1 << 40, steps=5, **settings):
        """Bytes of one checkpoint, and for how many there is no room."""
        monkeypatch.setattr("basis_rl.estimate.report.free_bytes", lambda folder: free)
        warnings = []
        args = config(tmp_path, save_strategy="steps", **settings)
        run = Footprint(ModelConfig(), args, Qwen3Config(**SHAPE), Launch(), 7, None, build_baseline(baseline))
        one = int(re.search(r"takes about (\d+)", disk(run, steps, warnings.append))[1])
        return one, *(int(re.search(r"but (\d+) checkpoint", text)[1]) for text in warnings)

    policy = model_size(Qwen3Config(**SHAPE), ModelConfig(model_name_or_path="m")).parameters
    assert found() == (12 * policy,)
    assert found(save_only_model=True) == found("sao", save_only_model=True) == (4 * policy,)
    # Beside it the critic, whose attention is frozen.
    critic = build_baseline("sao").module_parameters(Qwen3Config(**SHAPE))
    assert found("sao") == (12 * (policy + critic) - 8 * 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 2 * 4),)
    assert found(free=60 * policy, save_steps=1) == (12 * policy, 5)
    assert found(free=63 * policy, save_steps=0.3) == (12 * policy,)
    assert found(free=27 * policy, save_steps=0.3) == (12 * policy, 3)
    assert found(free=27 * policy, save_steps=1, save_total_limit=2) == (12 * policy, 3)
    assert found(free=27 * policy, save_steps=3, save_total_limit=2) == (12 * policy, 2)


AUTO = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
OFFLOADING = {"stage": 3, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("launch", "settings", "expected"),
    [
        (Launch(4), {"deepspeed": {**AUTO, "zero_optimization": OFFLOADING}}, ("deepspeed", 3, False, True)),
        (
            Launch(4, "deepspeed", 3, True, True),
            {"deepspeed": {**AUTO, "zero_optimization": {"stage": "auto"}}},
            ("deepspeed", 2, False, False),
        ),
        (Launch(4), {"fsdp": True, "fsdp_config": {"cpu_offload": True}}, ("fsdp", 0, True, True)),
        (Launch(4, "fsdp", 0, True, True), {"fsdp": True}, ("fsdp", 0, True, True)),
        (Launch(1), {"fsdp": True}, ("plain", 0, False, False)),
        (Launch(4, "deepspeed", 2), {"fsdp": True}, ("deepspeed", 2, False, False)),
        (Launch(4, "fsdp"), {}, ("fsdp", 0, False, False)),
    ],
)
def test_the_engine_of_a_recipe_is_that_of_transformers(launch, settings, expected, tmp_path):
    if "deepspeed" in settings:
        pytest.importorskip("deepspeed")
    with planned(launch):
        found = asked(launch, config(tmp_path, **settings))
        assert model_size(Qwen3Config(**SHAPE), ModelConfig(model_name_or_path="m")).layers == 2
    assert (found.engine, found.stage, found.offload_optimizer, found.offload_parameters) == expected
    assert found.world == launch.world
    assert found == launch or str(found).endswith(f"from {next(iter(settings))} of the recipe")
