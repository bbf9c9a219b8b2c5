"""What a cellular engine runs on: programs of cells, rows of state and launches in flight, in JAX."""
