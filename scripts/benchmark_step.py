"""Benchmark engine steps against the bounds of a device: `pensieve_lab.programs.benchmark_step`."""

from lab_program import start

if __name__ == "__main__":
    start("benchmark_step")
