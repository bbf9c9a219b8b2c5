"""Accelerator kernels. They are independent of models and of serving."""
