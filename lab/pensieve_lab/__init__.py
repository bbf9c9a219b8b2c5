"""The laboratory: workloads, simulators, benchmarks and experiments around the serving engine.

Nothing in `pensieve_jax` imports it. Programs run as `python -m pensieve_lab.programs.NAME --help`.
"""
