"""Parts of the benchmarks and the demo of Baton: padded batches that queries join and leave."""
