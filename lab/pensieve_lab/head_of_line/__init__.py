"""Short requests beside long ones that fill most of the pages, simulated or sent to a server."""
