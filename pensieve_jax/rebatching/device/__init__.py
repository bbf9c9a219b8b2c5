"""What an engine of padded batches runs on: attention over a ring, programs, rows in both memories."""
