"""Which codebook and which confidence suit BV-Blend? Its paper leaves these choices open.

    python -m studies.bv_blend_study PROBLEMS.json ENCODER [--quick]

PROBLEMS.json is a list of ``{"problem": ..., "difficulty": ...}``; the committed figures are for MATH's training set
(agentica-project/rllm, MIT licence), 7,474 problems of difficulty 1 to 5, and all-MiniLM-L6-v2. Prompts and embeddings
are real; rewards are simulated, ``V_i = sigmoid(c - 0.9 level_i + noise_i + tilt)``, with noise of 1.2 logits that no
encoder can predict, and a tilt that grows to 2 logits over 240 steps of 512 rollouts.

Results: ``studies/results/bv_blend_study.json``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from basis_rl.baselines import BVBlend
from basis_rl.clusters.codebook import Encoder
from benchmarks.common import one_thread
from studies.runs import placed, save_table, study_parser
from studies.simulated_mse import QUICK, Scale, error, run

SIZES = (1, 8, 32, 128, 300)  # sizes of the codebooks that runs are simulated with
SHARES = (8, 32, 75, 150, 300, 600, 1200)  # sizes of the codebooks that predict the level
TILT = 2.0  # logits by which all prompts have moved at the end


def held_out_share(vectors: np.ndarray, levels: np.ndarray, k: int) -> float:
    """R^2 when the level of a held-out prompt (a third of them) is predicted by its cluster's mean over the others."""
    order = np.random.default_rng(0).permutation(len(levels))
    train, test = order[: 2 * len(order) // 3], order[2 * len(order) // 3 :]
    fitted = KMeans(k, n_init=1, random_state=0).fit(vectors[train])
    means = np.array([levels[train][fitted.labels_ == j].mean() for j in range(k)])
    residual = levels[test] - means[fitted.predict(vectors[test])]
    return float(1 - (residual**2).mean() / levels[test].var())


def simulate(
    logits: Tensor, clusters: Sequence[int], group: int, rollouts: int = 512, scale: Scale | None = None, **params: Any
) -> dict[str, float]:
    """Mean squared error of the baseline from V over the first and the last steps of a simulated run.

    For the last steps also the share of rollouts with a signal, and the mean confidence.

    Args:
        logits: logit of each prompt's value before the run, ``(P,)``.
        clusters: cluster of each prompt, ``(P,)``.
        group: rollouts per prompt.
        rollouts: rollouts per step.
        scale: number of steps of the run, and of its first and last part.
        params: arguments of `BVBlend`.
    """
    scale = scale or Scale()
    torch.manual_seed(0)
    blend = BVBlend(dict(zip(map(str, range(len(clusters))), clusters, strict=True)), variance="paper", **params)
    kept: dict[str, list[float]] = {"first": [], "mse": [], "effective_signal": [], "confidence": []}

    def values_at(step: int) -> Tensor:
        return torch.sigmoid(logits + TILT * (step + 1) / scale.steps)

    for step, (truth, batch) in enumerate(run(values_at, len(logits), scale.steps, rollouts, group)):
        result = blend.advantages(batch)
        if step < scale.edge:
            kept["first"].append(error(result.baseline, truth))
        if step >= scale.steps - scale.edge:
            kept["mse"].append(error(result.baseline, truth))
            kept["effective_signal"].append(result.metrics["effective_signal"])
            kept["confidence"].append(result.metrics["confidence"])
        blend.update(batch)
    return {name: mean(values) for name, values in kept.items()}


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = study_parser(__doc__, "bv_blend_study")
    parser.add_argument("problems", type=Path, help="JSON list of problems with their difficulty")
    parser.add_argument("encoder", help="folder or Hub id of a sentence encoder")
    options = placed(parser.parse_args(argv))
    scale = QUICK if options.quick else Scale()
    one_thread()
    problems = json.loads(options.problems.read_text())
    levels = np.array([float(row["difficulty"]) for row in problems])
    vectors = Encoder(options.encoder)([row["problem"] for row in problems], progress=True)
    torch.manual_seed(0)
    logits = torch.tensor(1.8 - 0.9 * levels) + 1.2 * torch.randn(len(levels)).double()
    spread = float(torch.sigmoid(logits + TILT / 2).std())
    print(f"{len(levels)} prompts, standard deviation of V half-way {spread:.2f}")
    finest = len(levels) // 2 if options.quick else max(SHARES)
    shares = {k: held_out_share(vectors, levels, k) for k in SHARES if k <= finest}
    for k, share in shares.items():
        print(f"K = {k:4}: {share:.3f} of the variance of the level of unseen problems")
    codebooks = {k: KMeans(k, n_init=1, random_state=0).fit(vectors).labels_.tolist() for k in SIZES if k <= finest}
    codebooks[len(levels)] = list(range(len(levels)))  # every prompt for itself
    changes: list[dict[str, Any]] = [
        {"confidence": 0.0}, {"confidence": "count"}, {"confidence": "scale"}, {"mapping": "inverse"},
        {"mapping": "linear"}, {"decay": 0.1}, {"decay": 0.5}, {"prior_mass": 8.0}, {"prior_variance": 0.05},
    ]  # fmt: skip
    rows = []
    print("   G     K   MSE first, last   signal  confidence  parameters")
    for group in (1, 4, 8):
        cases: list[tuple[int, dict[str, Any]]] = [
            (k, {"temperature": t}) for k in codebooks for t in (0.05, 0.1, 0.2, 0.4, 0.7)
        ]
        cases += [(k, {"rollouts": scale.rollouts // 4}) for k in (8, 32, 128)] + [(32, changed) for changed in changes]
        for k, params in cases:
            if k not in codebooks:
                continue
            found = simulate(logits, codebooks[k], group, **{"rollouts": scale.rollouts, **params}, scale=scale)
            rows.append({"group": group, "k": k, "params": params, **found})
            errors = f"{found['first']:.4f}  {found['mse']:.4f}"
            print(f"{group:4} {k:5}  {errors}   {found['effective_signal']:.3f}   {found['confidence']:.2f}  {params}")
    facts = {"prompts": len(levels), "std_of_values": spread, "held_out_share": shares}
    save_table("bv_blend_study", facts, rows, options.results)


if __name__ == "__main__":
    main()
