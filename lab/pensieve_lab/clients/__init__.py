"""Clients that people bring, against a server: see `check_clients`."""
