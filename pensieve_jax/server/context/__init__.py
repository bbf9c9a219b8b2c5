"""Which turn a request goes on from: contexts are recognised by their messages, so clients may resend them.

Owns: hashes of messages, what the front remembers of turns, and the resolver of every route with messages.
Does not know: HTTP, JSON schemas, or where KV state is.
"""
