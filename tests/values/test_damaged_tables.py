"""A damaged value table is one message that names it, whatever is wrong."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from basis_rl.values import ValueTable


def parquet(**columns):
    def write(folder):
        pq.write_table(pa.table(columns), folder / "rewards.parquet")

    return write


def metadata(**changes):
    def write(folder):
        path = folder / "metadata.json"
        known = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in {**known, **changes}.items() if v != "gone"}))

    return write


def bytes_of(name, change):
    def write(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return write


IDS, PRINTS, REWARDS = ["a", "b"], [None, None], [[0.0, 1.0], [1.0]]
DAMAGES = {
    "table cut": bytes_of("rewards.parquet", lambda content: content[:-10]),
    "table empty": bytes_of("rewards.parquet", lambda content: b""),
    "table of text": bytes_of("rewards.parquet", lambda content: b"hello"),
    "table with flipped bits": bytes_of("rewards.parquet", lambda content: content[:4] + b"\xff" * 40 + content[44:]),
    "table gone": lambda folder: (folder / "rewards.parquet").unlink(),
    "no ids": parquet(fingerprint=PRINTS, rewards=REWARDS),
    "no rewards": parquet(prompt_id=IDS, fingerprint=PRINTS),
    "no fingerprints": parquet(prompt_id=IDS, rewards=REWARDS),
    "ids twice": parquet(prompt_id=["a", "a"], fingerprint=PRINTS, rewards=REWARDS),
    "ids of numbers": parquet(prompt_id=[1, 2], fingerprint=PRINTS, rewards=REWARDS),
    "ids missing": parquet(prompt_id=["a", None], fingerprint=PRINTS, rewards=REWARDS),
    "rewards of texts": parquet(prompt_id=IDS, fingerprint=PRINTS, rewards=[["0"], ["1"]]),
    "one reward each": parquet(prompt_id=IDS, fingerprint=PRINTS, rewards=[0.0, 1.0]),
    "infinite rewards": parquet(prompt_id=IDS, fingerprint=PRINTS, rewards=[[0.0], [float("inf")]]),
    "no rewards of one": parquet(prompt_id=IDS, fingerprint=PRINTS, rewards=[[0.0], []]),
    "rewards out of range": parquet(prompt_id=IDS, fingerprint=PRINTS, rewards=[[0.0], [7.0]]),
    "no rows": parquet(
        prompt_id=pa.array([], pa.string()), fingerprint=pa.array([], pa.string()), rewards=pa.array([])
    ),
    "metadata cut": bytes_of("metadata.json", lambda content: content[:20]),
    "metadata a list": bytes_of("metadata.json", lambda content: b"[]"),
    "metadata of bytes": bytes_of("metadata.json", lambda content: b"\xff\xfe\x00"),
    "metadata gone": lambda folder: (folder / "metadata.json").unlink(),
    "no format": metadata(format="gone"),
    "format of another kind": metadata(format="new"),
    "no range": metadata(reward_range="gone"),
    "half a range": metadata(reward_range=[0.0]),
    "range of texts": metadata(reward_range=["low", "high"]),
    "no provenance": metadata(provenance="gone"),
    "provenance a text": metadata(provenance="mine"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_table_is_one_clear_message(how, tmp_path):
    folder = ValueTable.from_rewards({"a": [0.0, 1.0], "b": [1.0]}).save(tmp_path / "table")
    assert ValueTable.load(folder).prompt_ids == ["a", "b"]
    DAMAGES[how](folder)
    with pytest.raises(ValueError, match=r"is damaged: .*basis-rl values|is not a value table") as raised:
        ValueTable.load(folder)
    assert type(raised.value) is ValueError
    assert str(folder) in str(raised.value)
    assert len(str(raised.value)) < 600
