"""Many engines behind one address: a front that sends each turn to the replica which has its conversation.

Owns: which replica a turn goes to, what becomes of turns whose replica dies, and what Ray Serve is told.
Does not know: HTTP, or how an engine works. Ray, an extra, is known to `serve_app`, `ray_replicas`, `local`.
"""
