"""Files that are copied beside vLLM's tests, and run in an environment of their own.

Owns: what stands in for vLLM's server and packages.
Does not know: this project.
"""
