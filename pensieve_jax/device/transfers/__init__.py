"""Chunks on their way between device pages and pinned host memory."""
