"""Baselines of cellular batching: other schedulers of the same cells, on the same devices."""

from pensieve_lab.cells.baselines.fixed_graph import FixedGraph
from pensieve_lab.cells.baselines.graph_merging import GraphMerging
from pensieve_lab.cells.baselines.padding import Padding

__all__ = ["FixedGraph", "GraphMerging", "Padding"]
