"""Which of many replicas serves a turn: rules for a front, in plain Python.

Owns: the rules, and what a front must know for them.
Does not know: who asks. Nothing here imports anything else of this package, so that a router in front of
engines and the simulator share it.
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
