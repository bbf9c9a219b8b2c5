"""A matrix of client libraries and programs: each library in an environment of its own, against one server.

Owns: the list of clients, their environments, the running of their programs, and the causes of failures.
Does not know: how the server answers, or what a client library does.
"""
