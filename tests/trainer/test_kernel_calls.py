"""Calls of attention kernels that only a GPU has: their arguments, and the scores if the kernel keeps its contract."""

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.trainer.utils import add_fused_lm_head

from basis_rl.trainer import attention
from tests.device.test_gpu_packing import SHAPES, assert_as_exact_as_single_rows
from tests.support.architectures import small_model
from tests.support.kernels import HALF, Flash, Varlen
from tests.support.tiny import tiny_model, tiny_trainer
from tests.trainer.test_packed_rows import scores, small_rows

MODELS = ("Qwen3", "Mistral", "Granite")
FLASH = "flash_attention_reference"
varlen_kernel = attention.varlen_attn


@pytest.fixture
def varlen(monkeypatch):
    if varlen_kernel is None:
        pytest.skip("torch before 2.10 has no varlen_attn")
    reference = Varlen(varlen_kernel)
    monkeypatch.setattr(attention, "varlen_attn", reference)
    # All that the product asks, except for a GPU.
    monkeypatch.setattr(attention, "_has_varlen", lambda query, key, value: query.dtype in HALF)
    return reference


@pytest.fixture
def flash(monkeypatch):
    """Transformers' own flash attention above a reference kernel."""
    reference = Flash()
    process = flash_utils._lazy_define_process_function(reference.varlen)
    found = ((reference.dense, reference.varlen, None, None, None), (process, dict))
    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", lambda *args, **kwargs: found)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, FLASH, flash_attention_forward)
    return reference


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kernel", ["varlen", "flash"])
def test_kernels_are_called_as_they_and_transformers_document(kernel, name, case, precision, request):
    """Grouped queries, a sliding window, a scale of the scores."""
    reference = request.getfixturevalue(kernel)
    assert_as_exact_as_single_rows("sdpa" if kernel == "varlen" else FLASH, name, case, precision)
    assert reference.calls == 2, "once in each layer, for all segments"


def test_weights_of_float32_are_asked_in_the_16_bits_that_a_kernel_takes(flash, tmp_path):
    model = tiny_model()
    model.config._attn_implementation = FLASH
    assert tiny_trainer(tmp_path, model=model, bf16=True).packing.shared
    assert flash.calls


def test_the_kernel_has_no_dropout_so_a_model_with_one_is_not_given_to_it(varlen):
    model = small_model("Qwen3", dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    scores(model, *small_rows())
    assert not varlen.calls
    model.eval()
    scores(model, *small_rows())
    assert varlen.calls


def test_the_reference_refuses_what_a_kernel_would_read_wrongly(varlen):
    def tensors(dtype=torch.bfloat16):
        return [torch.randn(4, 2, 8).to(dtype) for _ in range(3)]

    ends = torch.tensor([0, 1, 4], dtype=torch.int32)
    varlen(*tensors(), ends, ends, 3, 3, window_size=(-1, 0))
    wrong = {
        "int64 ends": (*tensors(), ends.long(), ends, 3, 3),
        "float32": (*tensors(torch.float32), ends, ends, 3, 3),
        "a maximum that is a tensor": (*tensors(), ends, ends, torch.tensor(3), 3),
        "a maximum that is too small": (*tensors(), ends, ends, 2, 3),
        "another layout": (*(each.transpose(0, 2) for each in tensors()), ends, ends, 3, 3),
        "tokens beyond the last segment": (*tensors(), ends[:2], ends[:2], 1, 1),
    }
    for given in wrong.values():
        with pytest.raises(AssertionError):
            varlen(*given, window_size=(-1, 0))
    with pytest.raises(TypeError, match="no_such"):
        varlen(*tensors(), ends, ends, 3, 3, no_such=True)
