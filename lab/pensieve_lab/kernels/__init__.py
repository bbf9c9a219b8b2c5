"""What `benchmark_kernels.py` is made of."""
