"""Prompt clusters for BV-Blend: a frozen encoder and a K-means codebook, built offline."""

from basis_rl.clusters.codebook import PromptClusters

__all__ = ["PromptClusters"]
