"""Eviction orders of idle chunks: policies, recomputation costs, and the order that learns."""
