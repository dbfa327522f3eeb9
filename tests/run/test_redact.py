"""Secrets of many shapes do not reach what is saved, and what is no secret stays."""

import json
import time
from pathlib import Path

import pytest

from basis_rl.run.redact import is_secret, redact, redact_command

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

X = "Zq7Lm2Wk9Rt4Yb6Nc1Vd8Hs3"  # what must not be seen
SHAPES = CASES["secrets"]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_secret_is_not_shown(shape):
    shown = str(redact(SHAPES[shape]))
    assert X not in shown
    assert "AKIAZQ" not in shown
    assert str(redact(redact(SHAPES[shape]))) == shown


def test_what_stands_beside_it_stays():
    assert redact(SHAPES["flag in a text"]) == {"serve_args": "--api-key <hidden> --max-num-seqs 8"}
    assert redact(SHAPES["query"]) == {"url": "https://host/path?token=<hidden>&page=2"}
    assert redact(SHAPES["json"]) == {"model_init_kwargs": '{"dtype": "bf16"}'}
    assert "n=1" in redact(SHAPES["python in a text"])["text"]


PLAIN = CASES["plain"]


@pytest.mark.parametrize("key", PLAIN)
def test_what_is_no_secret_is_shown(key):
    assert redact({key: PLAIN[key]}) == {key: PLAIN[key]}
    assert not is_secret(key)


def test_command_lines():
    given = [f"--serve_args=--api-key {X} --a 1", "--wandb_key", X, f"--url=http://h?token={X}", f"--api-key={X}"]
    shown = redact_command(["r.yaml", *given, f'--kwargs={{"token": "{X}", "dtype": "bf16"}}', "--seed", "3"])
    assert X not in " ".join(shown)
    assert shown[:2] == ["r.yaml", "--serve_args=--api-key <hidden> --a 1"]
    assert shown[5:] == ["--api-key=<hidden>", '--kwargs={"dtype": "bf16"}', "--seed", "3"]


UNITS = ["_", "a_", "-", "sk-", "eyJaaaaaaaa-", "://", 'key="', "--key ", "-a_", "_key", "_" * 64 + "a" * 500]
UNITS += ["Token", "aT", "AT", "pw ", "- ", "[", '{"a":', "[" + "1" * 5000 + ",", "key: ", "-----BEGIN "]
UNITS += ["api_keys: ['", "://a.hook", "/webhook", "a.hook", "apassword", "Signature=", "key:", "monkey=", "sig=("]


@pytest.mark.parametrize("unit", UNITS)
def test_any_text_is_read_in_linear_time(unit):
    """A model may write any text: with a square of the length, 100,000 characters would take an hour."""
    text = "key sk- hook Basic " + unit * (100_000 // len(unit))
    began = time.process_time()
    redact(text)
    redact(text[19:])
    assert time.process_time() - began < 5
