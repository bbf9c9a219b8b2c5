"""Several engines behind one address: a front end sends each turn to the replica of its conversation.

Owns: the routing of turns to replicas, the retry of turns whose replica dies, and the Ray Serve deployments.
Does not know: HTTP, or how an engine works. Only `serve_app`, `ray_replicas` and `local` import Ray, which is
an optional extra.
"""
