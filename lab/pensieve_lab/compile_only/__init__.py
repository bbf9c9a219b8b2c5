"""Compiling for an NVIDIA H200 on a machine without a GPU; parts of `programs.compile_for_h200`."""
