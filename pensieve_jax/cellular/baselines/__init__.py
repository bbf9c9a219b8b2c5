"""Rivals of cellular batching: other schedulers of the same cells, on the same devices."""

from pensieve_jax.cellular.baselines.fixed_graph import FixedGraph
from pensieve_jax.cellular.baselines.graph_merging import GraphMerging
from pensieve_jax.cellular.baselines.padding import Padding

__all__ = ["FixedGraph", "GraphMerging", "Padding"]
