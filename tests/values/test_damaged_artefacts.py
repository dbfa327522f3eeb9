"""A damaged value table or prompt codebook is one message that names it, whatever is wrong."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from basis_rl.clusters import PromptClusters
from basis_rl.values import ValueTable


def table(folder):
    return ValueTable.from_rewards({"a": [0.0, 1.0], "b": [1.0]}).save(folder)


def codebook(folder):
    known = {"encoder": "m", "revision": None, "probe": [0.0, 1.0]}
    made = PromptClusters({"a": 0, "b": 1}, centroids=np.eye(2, dtype=np.float32), provenance=known)
    return made.save(folder)


def rows(name, **columns):
    return lambda folder: pq.write_table(pa.table(columns), folder / f"{name}.parquet")


def metadata(**changes):
    def write(folder):
        path = folder / "metadata.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return write


def content(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


IDS, PRINTS, REWARDS = ["a", "b"], [None, None], [[0.0, 1.0], [1.0]]
DAMAGES = {
    table: {
        "cut": content("rewards.parquet", lambda whole: whole[:-10]),
        "flipped bits": content("rewards.parquet", lambda whole: whole[:4] + b"\xff" * 40 + whole[44:]),
        "gone": lambda folder: (folder / "rewards.parquet").unlink(),
        "no rewards": rows("rewards", prompt_id=IDS, fingerprint=PRINTS),
        "ids twice": rows("rewards", prompt_id=["a", "a"], fingerprint=PRINTS, rewards=REWARDS),
        "ids of numbers": rows("rewards", prompt_id=[1, 2], fingerprint=PRINTS, rewards=REWARDS),
        "rewards of texts": rows("rewards", prompt_id=IDS, fingerprint=PRINTS, rewards=[["0"], ["1"]]),
        "one reward each": rows("rewards", prompt_id=IDS, fingerprint=PRINTS, rewards=[0.0, 1.0]),
        "infinite rewards": rows("rewards", prompt_id=IDS, fingerprint=PRINTS, rewards=[[0.0], [float("inf")]]),
        "rewards out of range": rows("rewards", prompt_id=IDS, fingerprint=PRINTS, rewards=[[0.0], [7.0]]),
        "metadata cut": content("metadata.json", lambda whole: whole[:20]),
        "metadata a list": content("metadata.json", lambda whole: b"[]"),
        "half a range": metadata(reward_range=[0.0]),
        "provenance a text": metadata(provenance="mine"),
    },
    codebook: {
        "no ids": rows("clusters", cluster=[0, 1]),
        "ids twice": rows("clusters", prompt_id=["a", "a"], cluster=[0, 1]),
        "clusters missing": rows("clusters", prompt_id=["a", "b"], cluster=[0, None]),
        "negative clusters": rows("clusters", prompt_id=["a", "b"], cluster=[0, -1]),
        "clusters of no centroid": rows("clusters", prompt_id=["a", "b"], cluster=[0, 2]),
        "centroids of several lengths": rows("centroids", centroid=[[0.0], [0.0, 1.0]]),
        "centroids that are numbers": rows("centroids", centroid=[0.0, 1.0]),
        "infinite centroids": rows("centroids", centroid=[[0.0, float("inf")], [1.0, 0.0]]),
        "no provenance": metadata(provenance=None),
    },
}


@pytest.mark.parametrize(("make", "how"), [(make, how) for make, damages in DAMAGES.items() for how in damages])
def test_a_damaged_artefact_is_one_clear_message(make, how, tmp_path):
    kind = {table: ValueTable, codebook: PromptClusters}[make]
    folder = make(tmp_path / "made")
    kind.load(folder)
    DAMAGES[make][how](folder)
    with pytest.raises(ValueError, match=r"is damaged: .*basis-rl (values|clusters)|is not a value table") as raised:
        kind.load(folder)
    assert type(raised.value) is ValueError
    assert str(folder) in str(raised.value)
    assert len(str(raised.value)) < 600
