"""Parts of `benchmark_kernels.py`, the benchmark of attention kernels."""
