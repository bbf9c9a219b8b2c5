"""Simulate the savings of stateful serving on a trace of yours: `pensieve_lab.programs.simulate_serving`."""

from lab_program import start

if __name__ == "__main__":
    start("simulate_serving")
