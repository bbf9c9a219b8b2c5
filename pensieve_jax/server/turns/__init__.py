"""Turns as every format of the API needs them: sampling, items, checks, storing, running.

Owns: what Chat Completions, Completions and Responses share between a request's fields and an engine's turn.
Does not know: the body or the answer of any one format.
"""
