"""vLLM's engine in the trainer's process, and vLLM's server beside it: every step syncs the weights.

Weights go to the server through a folder and over NCCL (not by CUDA IPC, which `basis_rl` does not use).
"""

import math

import pytest

from basis_rl.engine.server import Server, ServerOptions, free_port
from tests.device.launch import CUDA, GPUS, launch, save_model

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.long]
SHAPE = (151_936, 512, 12, 8) if CUDA else (320, 128, 2, 4)  # vLLM's kernels need heads of size 32 or more
TOLERANCE = 0.25 if CUDA else 1e-4  # of log-probabilities; bfloat16 on a GPU
CONTEXT, TOKENS, STEPS = (512, 64, 4) if CUDA else (128, 12, 4)
ON_A_GPU = pytest.mark.skipif(not CUDA, reason="needs a GPU")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("vllm")
    save_model(root / "model", SHAPE)
    return root


@pytest.fixture(scope="module")
def server(root):
    """A server on the second GPU where there are several."""
    extra = ("--gpu-memory-utilization", "0.2", "--enforce-eager") if CUDA else ()
    options = ServerOptions(
        str(root / "model"), port=0, dtype="bfloat16" if CUDA else "float32", max_model_len=CONTEXT,
        log=root / "server.log", devices=GPUS[1] if len(GPUS) > 1 else None, extra=extra,
    )  # fmt: skip
    with Server(options, 90.0 if CUDA else 270.0) as running:
        yield running


def trained(root, name, record_property, **settings):
    """Train for `STEPS` steps with sampled rollouts, and check that the engine samples as the policy would."""
    settings = {"use_vllm": True, "given": False, "max_steps": STEPS, "max_completion_length": TOKENS, **settings}
    (rank,) = launch(root, name, "rloo", **settings)
    keys = ("rollout/sync_error", "rollout/kl", "grad_norm", "step_time")
    log = {key: [entry[key] for entry in rank["log"] if key in entry] for key in keys}
    for key, values in log.items():
        record_property(key, values)
    record_property("peak bytes of torch", rank["peak bytes"])
    assert all(math.isfinite(value) for values in log.values() for value in values)
    assert len(log["rollout/sync_error"]) == STEPS
    assert max(log["rollout/sync_error"]) <= TOLERANCE
    assert max(log["grad_norm"]) > 0


@pytest.mark.parametrize("sleeps", [False, pytest.param(True, marks=ON_A_GPU)])
def test_the_engine_in_the_trainers_process(sleeps, root, record_property):
    """Without compilation, which starts sooner; and on a GPU compiled and with sleep mode."""
    settings = {"vllm_enable_sleep_mode": True} if sleeps else {"eager_engine": CUDA}
    if CUDA:
        settings["vllm_gpu_memory_utilization"] = 0.2
    name = "sleeps" if sleeps else "awake"
    trained(root, name, record_property, vllm_mode="colocate", vllm_max_model_length=CONTEXT, **settings)


def test_a_server_with_weights_through_a_folder(root, server, record_property):
    settings = {"vllm_mode": "server", "vllm_server_base_url": server.url}
    trained(root, "folder", record_property, vllm_weight_sync="folder", **settings)


@ON_A_GPU
def test_a_server_with_weights_over_nccl(root, server, record_property):
    settings = {"vllm_mode": "server", "vllm_server_base_url": server.url, "timeout": 60.0}
    try:
        trained(root, "nccl", record_property, vllm_weight_sync="nccl", vllm_group_port=free_port(), **settings)
    except RuntimeError as error:
        if len(GPUS) > 1:
            raise
        record_property("failed on one GPU", str(error)[-1500:])
        pytest.skip("NCCL refuses a second process on one GPU")
