"""Demonstrate re-batching of queries of several lengths: `pensieve_lab.programs.demo_rebatching`."""

from lab_program import start

if __name__ == "__main__":
    start("demo_rebatching")
