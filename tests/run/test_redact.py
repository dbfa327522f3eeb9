"""Secrets of thirty shapes do not reach what is saved, and what is no secret stays."""

import json

import pytest

from basis_rl.run.redact import is_secret, redact, redact_command

X = "Zq7Lm2Wk9Rt4Yb6Nc1Vd8Hs3"  # what must not be seen
SHAPES = {
    "setting": {"hub_token": X},
    "api key": {"api_key": X},
    "any key": {"wandb_key": X},
    "aws": {"secret_access_key": X, "aws_access_key_id": X},
    "password": {"db_password": X},
    "authorization": {"headers": {"Authorization": X}},
    "nested": {"a": [{"b": ({"client_secret": X},)}]},
    "json": {"model_init_kwargs": json.dumps({"token": X, "dtype": "bf16"})},
    "json list": {"x": json.dumps([{"token": X}])},
    "flag in a text": {"serve_args": f"--api-key {X} --max-num-seqs 8"},
    "flag with equals": {"serve_args": f"--api-key={X} --max-num-seqs 8"},
    "flag with quotes": {"serve_args": f"--api-key '{X} {X}' --max-num-seqs 8"},
    "query": {"url": f"https://host/path?token={X}&page=2"},
    "second of a query": {"url": f"https://host/path?page=2&api_key={X}"},
    "user of a url": {"url": f"https://me:{X}@host/path"},
    "bearer": {"header": f"Authorization: Bearer {X}"},
    "bearer in a list": ["-H", f"Bearer {X}"],
    "basic": {"header": f"Basic {X}=="},
    "assignment": {"env": f"export OPENAI_API_KEY={X}; run"},
    "yaml in a text": {"text": f"user: me\npassword: {X}\n"},
    "python in a text": {"text": f"client(api_key='{X}', n=1)"},
    "hugging face": {"x": f"see hf_{X}."},
    "organisation": {"x": f"api_org_{X}"},
    "github": {"x": f"ghp_{X}"},
    "github, fine-grained": {"x": f"github_pat_{X}"},
    "gitlab": {"x": f"glpat-{X}"},
    "openai": {"x": f"sk-{X}"},
    "openai, of a project": {"x": f"sk-proj-{X}"},
    "anthropic": {"x": f"sk-ant-api03-{X}"},
    "slack": {"x": f"xoxb-12345-{X}"},
    "aws id": {"x": "AKIAZQ7LM2WK9RT4YB6N"},
    "google": {"x": f"AIza{X}abcdefgh"},
    "web token": {"x": f"eyJhbGciOiJI.{X}.{X}"},
    "private key": {"x": f"-----BEGIN RSA PRIVATE KEY-----\n{X}\n-----END RSA PRIVATE KEY-----"},
    "nvidia": {"x": f"nvapi-{X}"},
}


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


PLAIN = {
    "learning_rate": 1e-6,
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "stop_token": "</answer>",
    "max_tokens": 12,
    "num_tokens": "12",
    "prompt_template": "Question: {prompt}\nAnswer token by token: think, then answer.",
    "model": "me/sk-learner-for-keys",
    "serve_args": "--max-num-seqs 8 --tokenizer me/tok --enable-prefix-caching",
    "url": "https://host/path?page=2&key_order=up",
    "tokenizer": "gpt2",
    "monkey": "banana",
    "lora_target_modules": ["key_proj", "k_proj"],
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
}


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
