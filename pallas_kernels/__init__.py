"""Accelerator kernels that know nothing of models or serving."""
