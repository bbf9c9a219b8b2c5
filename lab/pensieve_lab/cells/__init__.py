"""Shared parts of the cellular batching experiments: systems, requests, and load generation."""
