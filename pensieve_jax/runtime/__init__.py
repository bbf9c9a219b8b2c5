"""Compiling programs, and keeping what was compiled: for every engine of this repository."""
