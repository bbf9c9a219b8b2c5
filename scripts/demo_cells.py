"""Compare cellular batching with batching by graphs: `pensieve_lab.programs.demo_cells`."""

from lab_program import start

if __name__ == "__main__":
    start("demo_cells")
