"""``basis-rl clusters RECIPE``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_high

from basis_rl.clusters import PromptClusters
from basis_rl.clusters.codebook import KIND, default_num_clusters
from basis_rl.data import problem_text
from basis_rl.recipe.build import load_config_and_tokenizer, load_training_data
from basis_rl.recipe.file import parse_recipe


def main(argv: Sequence[str]) -> int:
    """Embed the recipe's prompts, cluster them, and write the codebook where the baseline will look for it."""
    recipe = parse_recipe(argv)
    run = recipe.run
    output = run.clusters_output_dir or (run.baseline_kwargs or {}).get("clusters")
    if not isinstance(output, str):
        raise ValueError("Where should the codebook go? Set baseline_kwargs.clusters, or --clusters_output_dir FOLDER.")
    KIND.check_destination(Path(output))
    if run.environment:
        raise ValueError("basis-rl clusters embeds the prompts of a dataset, and an environment makes its own.")
    _, tokenizer = load_config_and_tokenizer(recipe.model, recipe.args, run.chat_template)
    prompts = {row["prompt_id"]: problem_text(row["prompt"]) for row in load_training_data(recipe, tokenizer)}
    k = run.clusters_num or default_num_clusters(len(set(prompts.values())), recipe.args.generation_batch_size)
    clusters = PromptClusters.build(prompts, run.clusters_encoder, k, seed=recipe.args.seed, progress=True)
    print(f"Prompt codebook: {clusters.save(output)}")
    print(shown_clusters(clusters, prompts))
    return 0


def shown_clusters(clusters: PromptClusters, prompts: Mapping[str, str], shown: int = 5) -> str:
    """Sizes of the clusters, and three prompts of each of the largest ones."""
    members: dict[int, list[str]] = {}
    for prompt_id, cluster in clusters.assignments.items():
        members.setdefault(cluster, []).append(prompts[prompt_id])
    sizes = [len(texts) for texts in members.values()]
    span = f"{min(sizes)} to {max(sizes)} prompts, median {median_high(sizes)}"
    lines = [f"{len(prompts)} prompts in {len(clusters)} clusters of {span}."]
    for cluster in sorted(members, key=lambda cluster: -len(members[cluster]))[:shown]:
        lines.append(f"cluster {cluster}, {len(members[cluster])} prompts:")
        lines += [f"    {' '.join(text.split())[:100]}" for text in members[cluster][:3]]
    return "\n".join(lines)
