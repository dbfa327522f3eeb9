"""A damaged prompt codebook is one message that names it, whatever is wrong."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from basis_rl.clusters import PromptClusters


def parquet(name="clusters", **columns):
    return lambda folder: pq.write_table(pa.table(columns), folder / f"{name}.parquet")


def provenance(value):
    def write(folder):
        path = folder / "metadata.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "provenance": value}))

    return write


NAMED = {"encoder": "m", "revision": None, "probe": [0.0, 1.0]}
DAMAGES = {
    "cut": lambda folder: (folder / "clusters.parquet").write_bytes(b"PAR1"),
    "no ids": parquet(cluster=[0, 1]),
    "ids twice": parquet(prompt_id=["a", "a"], cluster=[0, 1]),
    "ids of numbers": parquet(prompt_id=[1, 2], cluster=[0, 1]),
    "clusters of texts": parquet(prompt_id=["a", "b"], cluster=["x", "y"]),
    "clusters missing": parquet(prompt_id=["a", "b"], cluster=[0, None]),
    "negative clusters": parquet(prompt_id=["a", "b"], cluster=[0, -1]),
    "clusters of no centroid": parquet(prompt_id=["a", "b"], cluster=[0, 2]),
    "centroids cut": lambda folder: (folder / "centroids.parquet").write_bytes(b"PAR1"),
    "centroids of texts": parquet("centroids", centroid=["a", "b"]),
    "centroids of several lengths": parquet("centroids", centroid=[[0.0], [0.0, 1.0]]),
    "centroids that are numbers": parquet("centroids", centroid=[0.0, 1.0]),
    "infinite centroids": parquet("centroids", centroid=[[0.0, float("inf")], [1.0, 0.0]]),
    "provenance a list": provenance([1]),
    "no provenance": provenance(None),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_codebook_is_one_clear_message(how, tmp_path):
    made = PromptClusters({"a": 0, "b": 1}, centroids=np.eye(2, dtype=np.float32), provenance=NAMED)
    folder = made.save(tmp_path / "book")
    assert PromptClusters.load(folder).assignments == {"a": 0, "b": 1}
    DAMAGES[how](folder)
    with pytest.raises(ValueError, match=r"is damaged: .*basis-rl clusters") as raised:
        PromptClusters.load(folder)
    assert type(raised.value) is ValueError
    assert str(folder) in str(raised.value)
    assert len(str(raised.value)) < 600


def test_without_its_encoder_a_codebook_knows_old_prompts_only(tmp_path):
    made = PromptClusters({"a": 0, "b": 1}, centroids=np.eye(2, dtype=np.float32), provenance={"encoder": "m"})
    loaded = PromptClusters.load(made.save(tmp_path / "book"))
    assert loaded.assignments == {"a": 0, "b": 1}
    with pytest.raises(ValueError, match="which encoder it was built with"):
        loaded.load_encoder()
