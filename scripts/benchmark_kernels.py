"""Benchmark attention kernels against bounds and baselines: `pensieve_lab.programs.benchmark_kernels`."""

from lab_program import start

if __name__ == "__main__":
    start("benchmark_kernels")
