"""Racing operations on a server, and the check of every answer against a sequential model."""
