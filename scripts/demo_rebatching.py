"""Queries of several lengths in one padded batch, in a minute: `pensieve_lab.programs.demo_rebatching`."""

from lab_program import start

if __name__ == "__main__":
    start("demo_rebatching")
