"""Servers of two real processes on the fake runner, what is done to them, and what must be left of it."""
