"""Every attention kernel against its bounds and its peers: `pensieve_lab.programs.benchmark_kernels`."""

from lab_program import start

if __name__ == "__main__":
    start("benchmark_kernels")
