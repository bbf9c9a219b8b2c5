"""Parts of `scripts/run_mutants.py`: small changes of the product's code, and which of them the tests notice.

The changes come from cosmic-ray, whose operators are maintained and usable one at a time as a library. Its
runner starts a new test process for each change, which would import JAX for ten seconds each time. mutmut 3
rewrites every function into a trampoline that selects the change at run time and forks from a process that
has already run tests; JAX's threads do not survive such a fork, and code that is traced once would keep the
change of an earlier run.
"""
