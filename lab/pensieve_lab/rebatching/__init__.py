"""Parts of the benchmarks and the demonstration of padded batches that queries join and leave (Baton)."""
