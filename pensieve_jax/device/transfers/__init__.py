"""Copies of chunks between device pages and pinned host memory."""
