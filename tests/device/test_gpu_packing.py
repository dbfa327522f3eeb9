"""Packed rows in bfloat16 against single rows, with every attention that the device has."""

import functools
import importlib.util

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from basis_rl.trainer import attention as attention_of
from tests.functional.test_pack_rows import EVERY
from tests.support.architectures import small_model
from tests.support.tiny import DEVICE
from tests.trainer.test_packed_rows import error, gradients, row_by_row, scores, small_rows

pytestmark = pytest.mark.gpu
# Against float32: packed rows may be at most so many times as far off as single rows in bfloat16 are, or this far.
WORSE, LEAST = 2.0, 0.02
SHAPES = ("groups below a system message", "a deep tree")
if DEVICE != "cpu":
    # On a CPU test_packed_rows.py has every shape.
    SHAPES += ("no group", "nothing in common", "one prompt")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
TYPES = {"bfloat16": torch.bfloat16, "autocast": torch.float32, "float32": torch.float32}
PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def model_with(name, attention, dtype=torch.float32):
    model = small_model(name, "sdpa").to(DEVICE)
    # The usual size of weights: larger ones make bfloat16's logits too coarse to compare.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.div_(4.0)
    if attention in ATTENTIONS:
        model.set_attn_implementation(attention)
    else:
        # What a test has registered.
        model.config._attn_implementation = attention
    return model.to(dtype)


def measured(side, model, rows, precision="float32"):
    """Log-probabilities and entropies, and their gradient, in float32 on a CPU."""
    with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "autocast"):
        log_probs, entropy = side(model, *rows)
        gradient = gradients(model, log_probs.float(), entropy.float())
    found = torch.stack([log_probs.detach(), entropy.detach()])
    return found.float().cpu(), gradient.float().cpu()


def packed(model, *rows):
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    log_probs, entropy, method = scores(model, *rows)
    assert method.shared
    return log_probs, entropy


@functools.cache
def single_rows(name, case, precision):
    """Scores and gradient of rows by themselves."""
    return measured(row_by_row, model_with(name, "sdpa", TYPES[precision]), of_case(case), precision)


def of_case(case):
    return [each.to(DEVICE) for each in small_rows(case)]


def assert_as_exact_as_single_rows(attention, name, case, precision, record_property=lambda what, off: None):
    assert case in EVERY
    found = measured(packed, model_with(name, attention, TYPES[precision]), of_case(case), precision)
    expected, single = single_rows(name, case, "float32"), single_rows(name, case, precision)
    for what, ours, theirs, right in zip(("scores", "gradient"), found, single, expected, strict=True):
        assert ours.isfinite().all()
        off, of_single = error(ours, right), error(theirs, right)
        record_property(f"{what} off", off)
        record_property(f"{what} off, single rows", of_single)
        assert off <= max(WORSE * of_single, LEAST), what


@pytest.fixture
def kernel_calls(monkeypatch):
    """How often torch's kernel for variable lengths was called."""
    calls, kernel = [], attention_of.varlen_attn

    def counted(*args, **kwargs):
        calls.append(len(args[0]))
        return kernel(*args, **kwargs)

    if kernel is not None:
        monkeypatch.setattr(attention_of, "varlen_attn", counted)
    return calls


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("name", ["Qwen3", "Mistral", "Granite"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_packed_rows_are_as_exact_as_single_rows(attention, name, case, precision, kernel_calls, record_property):
    """Shared prefixes, grouped queries, a sliding window, and a scale of the scores."""
    if attention in PACKAGES and (DEVICE == "cpu" or importlib.util.find_spec(PACKAGES[attention]) is None):
        pytest.skip(f"needs a GPU and {PACKAGES[attention]}")
    assert_as_exact_as_single_rows(attention, name, case, precision, record_property)
    is_half = attention == "sdpa" and DEVICE == "cuda" and attention_of.varlen_attn is not None
    assert bool(kernel_calls) == is_half, "the kernel is used where it can be"


def test_in_float32_packed_rows_are_single_rows():
    """The kernel is for 16 bits, so that segments go through attention one by one."""
    expected, expected_gradient = single_rows("Qwen3", SHAPES[0], "float32")
    found, gradient = measured(packed, model_with("Qwen3", "sdpa"), of_case(SHAPES[0]))
    assert error(found, expected) < 1e-4
    assert error(gradient, expected_gradient) < 1e-3
