"""Turns, as all API formats use them: sampling, items, checks, storing, running.

Owns: the steps between a request's fields and an engine turn that Chat Completions, Completions and Responses
share. Does not know: the request or response schema of any one format. Called by `server.openai`.
"""
