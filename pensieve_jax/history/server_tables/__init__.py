"""Data that a server stores in the history beside turns: responses, conversation items, idempotency keys.

Owns: these tables, and the changes that a server commits to them, alone or together with a turn.
Does not know: turns, SQL of other tables, HTTP, or JSON schemas.
"""
