"""vLLM's own tests of its HTTP routes, run against a server of this project.

Owns: the choice of test files, their copy with another model's name, what stands in for vLLM's packages, and
the reading of results.
Does not know: the tests' sources, which are in vLLM's source distribution.
"""
