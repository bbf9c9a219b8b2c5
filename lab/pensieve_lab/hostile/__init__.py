"""Requests that are made to slow a server down, and the gaps of a stream beside them."""
