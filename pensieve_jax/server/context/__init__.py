"""Finding the turn that a request continues from by its messages, since clients resend whole conversations.

Owns: hashes of messages, the front end's index of turns, and the resolver of every route with messages.
Does not know: HTTP, JSON schemas, or where the KV cache is. Called by `server.openai` and `server.turns`.
"""
