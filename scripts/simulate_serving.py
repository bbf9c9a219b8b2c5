"""What keeping state would save on a trace of your own: `pensieve_lab.programs.simulate_serving`."""

from lab_program import start

if __name__ == "__main__":
    start("simulate_serving")
