"""Parts of `programs.run_mutants`: small changes of the product's code, and which of them the tests notice.

The changes come from cosmic-ray, whose operators are maintained and can be used one at a time as a library.
Its runner starts a test process for each change and runs every test there, so JAX would be imported each
time. mutmut 3.8 forks as the driver here does, but it wraps each function that it changes. It leaves out
functions with decorators (properties, what is jitted) and all code outside functions, and draws no sample by
seed.
"""
