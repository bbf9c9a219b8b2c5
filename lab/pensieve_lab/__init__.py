"""Workloads, simulators, benchmarks and experiments around the serving engine.

`pensieve_jax` imports nothing from here. Programs run as `python -m pensieve_lab.programs.NAME --help`.
"""
