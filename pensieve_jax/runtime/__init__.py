"""Compilation of programs and storage of executables, for every engine of this repository."""
