"""Rules that choose which of many replicas serves a turn, for a front end, in plain Python.

Owns: the rules, and the data that a front end must have for them.
Does not know: its callers. Nothing here imports anything else of this package, so that a router in front of
engines and the simulator can share it.
"""

from pensieve_jax.balance.hashing import ConsistentHash
from pensieve_jax.balance.load import IncomingTurn, Load, Speeds
from pensieve_jax.balance.named import RootPlacement
from pensieve_jax.balance.ring import HashRing

__all__ = [
    "ConsistentHash",
    "HashRing",
    "IncomingTurn",
    "Load",
    "RootPlacement",
    "Speeds",
]
