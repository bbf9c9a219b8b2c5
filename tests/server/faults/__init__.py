"""Servers of two real processes on the fake runner, the faults injected, and the checks afterwards."""
