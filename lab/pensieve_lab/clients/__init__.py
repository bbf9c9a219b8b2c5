"""Third-party clients that run against a server: see `check_clients`."""
