"""Engines that shard the model, on one rank, and two ranks: each is compared with one process without them."""

import pytest
import torch

from basis_rl.types import RolloutBatch
from benchmarks.gpu.runs import named_baseline
from tests.device.launch import CUDA, DEVICE, GPUS, launch, movement_off, save_model

pytestmark = [pytest.mark.gpu, pytest.mark.long]
ENGINES = {"zero3": "DEEPSPEED", "fsdp2": "FSDP", "zero2": "DEEPSPEED"}
# Tolerances of energies (absolute) and of the movement of the weights (relative): engines round to bfloat16 in other
# places, and two ranks sum in another order; on a CPU everything is float32.
ENERGIES, ENGINE_MOVED, RANKS_MOVED = (0.05, 0.2, 0.1) if CUDA else (1e-5, 0.02, 1e-3)
# SGD, since Adam hides the gradient's size. Its rate is so large that saving in bfloat16 (ZeRO-3) keeps the movement.
ONE_STEP = {"optim": "sgd", "learning_rate": 10.0 if CUDA else 1.0, "max_steps": 1}
TWO_STEPS = {"optim": "sgd", "learning_rate": 1.0, "max_steps": 2, "gradient_accumulation_steps": 1}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder with a model and the run ``plain`` without an engine, and what that run recorded."""
    root = tmp_path_factory.mktemp("engines")
    save_model(root / "model")
    (rank,) = launch(root, "plain", "otb", **ONE_STEP)
    return root, rank


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_on_one_rank_learns_what_a_run_without_it_learns(kind, plain, record_property):
    if ENGINES[kind] == "DEEPSPEED":
        for module in ("deepspeed", "hjson", "pydantic", "einops", "msgpack", "ninja", "cpuinfo"):
            pytest.importorskip(module)
    root, alone = plain
    (rank,) = launch(root, kind, "otb", kind=kind, **ONE_STEP)
    assert rank["type"].endswith(ENGINES[kind])
    assert rank["sharded"] == (kind != "zero2"), "parameters are in the engine's hands"
    assert rank["device"].startswith(DEVICE)
    ours, theirs = (each["kept"][0]["batch"]["energies"] for each in (rank, alone))
    off, moved = float((ours - theirs).abs().max()), movement_off(root, kind, "plain")
    record_property("energies off", off)
    record_property("movement off", moved)
    record_property("peak bytes", rank["peak bytes"])
    assert off <= ENERGIES
    assert moved <= ENGINE_MOVED, "as it was saved"


def test_two_ranks_train_as_one_does(tmp_path, record_property):
    """Over NCCL on two GPUs, and by gloo on one, since NCCL refuses two ranks there."""
    save_model(tmp_path / "model")
    (one,) = launch(tmp_path, "one", "otb", per_device_train_batch_size=16, **TWO_STEPS)
    backend = "nccl" if CUDA and len(GPUS) > 1 else "gloo"
    two = launch(
        tmp_path, "two", "otb", kind="ddp" if CUDA else "cpu", ranks=2, per_device_train_batch_size=8,
        ddp_backend=backend, **TWO_STEPS,
    )  # fmt: skip
    assert [rank["world"] for rank in two] == [2, 2]
    assert [rank["backend"] for rank in two] == [backend] * 2
    assert all(rank["device"].startswith(DEVICE) for rank in two)
    for kept in zip(*(rank["kept"] for rank in two), strict=True):
        left, right = (RolloutBatch(**each["batch"]) for each in kept)
        assert torch.equal(left.rewards, right.rewards)
        assert left.prompt_ids == right.prompt_ids
        assert torch.equal(left.energies, right.energies)
        expected = named_baseline("otb").advantages(left).values.float()
        assert torch.equal(torch.cat([each["advantages"] for each in kept]), expected)
        assert (expected != 0).any()
    alone, shared = one["kept"][0]["batch"], two[0]["kept"][0]["batch"]
    assert torch.equal(alone["rewards"], shared["rewards"])
    moved = movement_off(tmp_path, "two", "one")
    record_property("energies off", float((alone["energies"] - shared["energies"]).abs().max()))
    record_property("movement off", moved)
    assert moved <= RANKS_MOVED
