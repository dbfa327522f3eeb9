"""Weights in a folder and vLLM's worker, without vLLM: what is written, loaded and tied anew."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from basis_rl.engine import weights
from basis_rl.engine.weights import write_weights
from basis_rl.engine.worker import WeightSync


def test_weights_are_written_in_shards_and_a_folder_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_SHARD_BYTES", 40)
    parameters = {f"p{i}": torch.arange(4.0) + i for i in range(6)}
    parameters["transposed"] = torch.arange(6.0).view(2, 3).T
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "left.safetensors").touch()
    write_weights(folder, parameters.items())
    files = sorted(folder.iterdir())
    assert [len(load_file(path)) for path in files] == [3, 3, 1], "40 bytes and more each, and what is left"
    found = {name: value for path in files for name, value in load_file(path).items()}
    assert found.keys() == parameters.keys()
    assert all(torch.equal(found[name], value) for name, value in parameters.items())
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]

    def dying():
        yield "p0", torch.zeros(4)
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        write_weights(folder, dying())
    assert sorted(folder.iterdir()) == files, "what was there is there"


def test_a_tensor_may_be_freed_after_its_turn(tmp_path):
    shared = torch.zeros(3)

    def gathered():
        for i in range(3):
            shared.fill_(i)
            yield f"p{i}", shared

    write_weights(tmp_path / "weights", gathered())
    (path,) = (tmp_path / "weights").iterdir()
    assert {name: value.tolist() for name, value in load_file(path).items()} == {f"p{i}": [i] * 3 for i in range(3)}


class Embedding(torch.nn.Module):
    pass


class Head(Embedding):
    def __init__(self):
        super().__init__()
        self.tied_to, self.processed = None, []
        self.quant_method = SimpleNamespace(
            process_weights_after_loading=lambda head: self.processed.append(head.tied_to)
        )

    def tie_weights(self, embedding):
        self.tied_to = embedding


@pytest.fixture
def worker(monkeypatch):
    module = ModuleType("vllm.model_executor.layers.vocab_parallel_embedding")
    module.ParallelLMHead, module.VocabParallelEmbedding = Head, Embedding
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def of(tied, *embeddings):
        model = torch.nn.ModuleDict({f"embed{i}": each for i, each in enumerate(embeddings)})
        model["lm_head"] = Head()
        made = WeightSync()
        made.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=tied))
        made.model_runner = SimpleNamespace(get_model=lambda: model)
        made.loaded = []
        made.reload_weights = lambda weights_path: made.loaded.append((weights_path, model["lm_head"].tied_to))
        return made, model

    return of


def test_a_tied_head_is_tied_and_processed_after_loading(worker):
    embedding = Embedding()
    made, model = worker(True, embedding)
    assert made.basis_reload("folder") == {"tied": ["lm_head"]}
    assert made.loaded == [("folder", None)], "first the weights"
    assert model["lm_head"].tied_to is embedding
    assert model["lm_head"].processed == [embedding]


def test_a_head_of_its_own_is_left_alone_and_several_embeddings_are_refused(worker):
    made, model = worker(False, Embedding())
    assert made.basis_reload("folder") == {"tied": []}
    assert model["lm_head"].tied_to is None
    made, _ = worker(True, Embedding(), Embedding())
    with pytest.raises(RuntimeError, match="2 token embeddings"):
        made.basis_retie()


def test_a_worker_is_known_by_its_start_and_by_whose_weights_it_has(tmp_path):
    config = SimpleNamespace(model_type="small", hidden_size=8, num_hidden_layers=2, vocab_size=11)
    one, other = WeightSync(), WeightSync()
    for each in (one, other):
        each.model_config = SimpleNamespace(hf_text_config=config)
    assert one.basis_state() == one.basis_state()
    assert one.basis_state()["start"] != other.basis_state()["start"]
    assert one.basis_state()["model"] == vars(config)
    (tmp_path / "token").touch()
    assert [one.basis_state(str(tmp_path / name))["sees"] for name in ("token", "other")] == [True, False]

    def held(*given):
        state = one.basis_hold(*given)
        return state["run"], state["version"]

    assert held("a", {"pid": 1}, 1) == ("a", 1)
    assert held("b", {"pid": 2}, 5) == ("a", 1), "it is the other's"
    assert held("a", {"pid": 1}, 2) == ("a", 2)
    assert held("b", {"pid": 2}, 5, "a") == ("b", 5), "which is gone"
    assert held("a", None, 2) == ("b", 5), "not its own to release"
    held("b", None, 5)
    assert held("a", {"pid": 1}, 3) == ("a", 3)
