"""How exact are the energies of the fused head, in float32 and in bfloat16?

    python -m benchmarks.energy_precision [--quick]

They are compared with ``w = 1 - 2 pi(y) + sum_v pi(v)^2`` from a float64 softmax of float64 logits. In ``head``, these
logits come from the same hidden states and weights that the fused head multiplies, so only the rounding of the head
itself is measured. In ``all``, they come from the float32 model, so the rounding of weights and hidden states is
included. Tokens are sampled from the float32 model's policy, whose head is scaled so that it is nearly flat, peaked, or
certain of most tokens.

Results: ``benchmarks/results/energy_precision.json``.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from basis_rl.functional.energy import logit_gradient_energy
from benchmarks.common import one_thread, parser_of, save
from benchmarks.trainers import random_model

VOCABULARIES, ROWS, LENGTH = (32_768, 151_936), 8, 64  # one tile of the fused head, and five
SPREADS = {"flat": 0.5, "peaked": 4.0, "certain": 30.0}  # standard deviation of the logits of a token
# (weights in bfloat16, autocast to bfloat16, cast_lm_head_to_fp32)
PRECISIONS = {
    "float32": (False, False, False),
    "autocast": (False, True, False),
    "bfloat16": (True, False, False),
    "bfloat16, fp32 head": (True, False, True),
}


def spread_model(vocabulary: int, spread: float) -> Qwen3ForCausalLM:
    """A small Qwen3 whose logits have about the standard deviation `spread`."""
    model = random_model(vocabulary, 128, 2, 4, inner=2).eval()
    model.lm_head.weight.data.normal_(std=spread / 128**0.5)  # hidden states have a mean square of 1
    return model


def exact(hidden: Tensor, weight: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (drawn if None), their float64 energies and ``sum_v pi(v)^2``, each ``(n,)``; hidden ``(n, H)``."""
    rows, head = [], weight.double().T
    for start in range(0, len(hidden), 32):  # a float64 softmax of all rows at once takes a gigabyte
        probs = (hidden[start : start + 32].double() @ head).softmax(-1)
        chosen = torch.multinomial(probs, 1) if tokens is None else tokens[start : start + 32, None]
        squares = probs.square().sum(-1)
        rows.append((chosen[:, 0], 1 - 2 * probs.gather(-1, chosen)[:, 0] + squares, squares))
    drawn, energies, squares = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return drawn, energies, squares


@torch.no_grad()
def measure(vocabulary: int, spread: float) -> dict[str, dict[str, float]]:
    """Errors over ``ROWS x LENGTH`` tokens, the same ones for each precision."""
    reference = spread_model(vocabulary, spread)
    inputs = torch.randint(vocabulary, (ROWS, LENGTH))
    hidden = reference.model(inputs).last_hidden_state.flatten(0, 1)
    tokens, of_float32_model, _ = exact(hidden, reference.lm_head.weight)
    results = {}
    for name, (bfloat16, autocast, cast) in PRECISIONS.items():
        model = copy.deepcopy(reference)
        if bfloat16:
            model.bfloat16()
        add_fused_lm_head(model, cast_lm_head_to_fp32=cast, outputs=("log_probs", "entropy", "log_sum_sq_probs"))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(input_ids=inputs, shift_labels=tokens.view(inputs.shape), fused_lm_head=True)
            seen = model.model(inputs).last_hidden_state.flatten(0, 1)
        squares = output.log_sum_sq_probs.exp().flatten().double()
        assert 0 < squares.min() <= squares.max() <= 1, (name, squares.min(), squares.max())
        energies = logit_gradient_energy(output.log_probs, output.log_sum_sq_probs.exp()).flatten().double()
        multiplied = torch.bfloat16 if autocast else seen.dtype
        _, of_head, squares_of_head = exact(seen.to(multiplied), model.lm_head.weight.to(multiplied), tokens)
        results[name] = {
            "energy": float(of_head.mean()),
            "head, mean": float((energies - of_head).abs().mean()),
            "head, max": float((energies - of_head).abs().max()),
            "all, mean": float((energies - of_float32_model).abs().mean()),
            "all, max": float((energies - of_float32_model).abs().max()),
            "all, signed": float((energies - of_float32_model).mean()),
            "sum pi^2, head, relative": float(((squares - squares_of_head) / squares_of_head).abs().max()),
            "sum pi^2, min": float(squares.min()),
            "sum pi^2, max": float(squares.max()),
        }
    return results


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    quick = parser_of(__doc__).parse_args(argv).quick
    one_thread()
    results: dict[str, Any] = {}
    for vocabulary in (300,) if quick else VOCABULARIES:
        for kind, spread in SPREADS.items():
            rows = results[f"{vocabulary}, {kind}"] = measure(vocabulary, spread)
            print(f"\nvocabulary {vocabulary:,}, {kind}: mean energy, mean and largest error; sum pi^2")
            for name, row in rows.items():
                print(
                    f"  {name:20} {row['energy']:.3f}   head {row['head, mean']:.1e}, {row['head, max']:.1e}   "
                    f"all {row['all, mean']:.1e}, {row['all, max']:.1e}   "
                    f"sum pi^2 from {row['sum pi^2, min']:.3g} to {row['sum pi^2, max']:.6g}, "
                    f"off by {row['sum pi^2, head, relative']:.1e} of it"
                )
    if not quick:
        save("energy_precision", {"tokens": ROWS * LENGTH, "results": results})
    return results


if __name__ == "__main__":
    main()
