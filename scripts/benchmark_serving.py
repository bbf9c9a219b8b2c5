"""Benchmark serving with recorded or random arrivals: `pensieve_lab.programs.benchmark_serving`."""

from lab_program import start

if __name__ == "__main__":
    start("benchmark_serving")
