"""Device side of the cellular engine in JAX: programs of cells, rows of state and launches in flight."""
