"""Shared by all tests: no network, no telemetry, one thread a process."""

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """`pytest -m gpu` tests on a GPU where there is one, in this process on the first one only.

    With several, transformers would split each batch; `BASIS_TEST_GPUS` has all of them for tests that start ranks.
    """
    if config.option.markexpr.startswith("gpu") and (gpus := torch.cuda.device_count()):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        os.environ.setdefault("BASIS_TEST_DEVICE", "cuda")
        os.environ.setdefault("BASIS_TEST_GPUS", visible)
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms


PLOTTING = {"test_cli", "test_plan", "test_quickstart"}  # modules whose tests look at the plot of a run
OWN_WORKERS = {"test_math_verify", "test_failures", "test_base", "test_gpu_rewards"}  # at the workers that grade


def pytest_collection_finish() -> None:
    """Exempt everything imported from garbage collection: each training ends with one, of a second without this."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _cheaper(request: pytest.FixtureRequest) -> Iterator[None]:
    """No plots of runs, which take longer than the run of a tiny model, and one pool of workers that grade."""
    name = request.module.__name__.rpartition(".")[2]
    with pytest.MonkeyPatch.context() as patch:
        trainer, reward = map(sys.modules.get, ("basis_rl.trainer.trainer", "basis_rl.rewards.math.reward"))
        if trainer is not None and name not in PLOTTING:
            patch.setattr(trainer, "plot_training", lambda *args, **kwargs: None)
        if reward is not None and name not in OWN_WORKERS:
            make = reward.WorkerPool  # of processes whose imports take seconds
            patch.setattr(reward, "WorkerPool", lambda command, *args, **options: _graders(make, command[1:3], options))
        yield


_pools: list[Any] = []


def _graders(make: Any, script: list[str], options: dict[str, Any]) -> Any:
    if not _pools:
        _pools.append(make([sys.executable, *script, "3.0"], 2, 30.0, **options))
        _pools[0].close = lambda: None
    return _pools[0]


@pytest.fixture(scope="module")
def reward() -> Iterator[Any]:
    """That of mathematics, with what it remembers, one for each file of tests."""
    from basis_rl.rewards import MathVerifyReward

    reward = MathVerifyReward(num_workers=2, timeout=3.0)
    yield reward
    reward.close()


SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def _extensions(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled afresh, once a session: what a killed run left in the user's cache is not ours to wait for."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path_factory.mktemp("extensions"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip("needs ../shared/data (real GSM8K and MATH rows), which is not part of the project")
    return SHARED_DATA


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its tokenizer, as `from_pretrained` reads them."""
    from examples.quickstart.warm_start import save
    from tests.support.tiny import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer()
    save(tiny_model(tokenizer), tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def _vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The one real vLLM server of the tests that share: an untied model and the URL."""
    from tests.support.served import save_model, server

    folder = tmp_path_factory.mktemp("vllm")
    model = save_model(folder / "model", tied=False)
    with server(model, folder / "server.log") as running:
        yield model, running.url


@pytest.fixture
def vllm_server(_vllm_server: tuple[Path, str]) -> tuple[Path, str]:
    """A model and the URL of a real vLLM server, which has the weights of that model whatever was trained before."""
    from tests.support.served import push

    model, url = _vllm_server
    push(url, model)
    return model, url


def pytest_make_parametrize_id(val: object) -> str | None:
    """The same id in every process: an object's address would keep two of them from sharing the tests."""
    shown = repr(val)
    return re.sub(r" at 0x[0-9a-f]+", "", shown) if " at 0x" in shown else None


@pytest.fixture
def machines() -> Iterator[Any]:
    """Two machines with a link (`tests.support.machines`)."""
    from tests.support.machines import two_machines

    try:
        with two_machines() as made:
            yield made
    except (PermissionError, FileNotFoundError) as error:
        pytest.skip(f"network namespaces are not to be had: {error}")
