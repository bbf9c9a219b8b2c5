"""Device side of the re-batching engine: attention over a ring, programs, and rows in both memories."""
