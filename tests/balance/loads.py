"""Replicas, loads and turns that tests of rules share."""

from __future__ import annotations

from pensieve_jax.balance import IncomingTurn, Load, Speeds

SPEEDS = Speeds(token_s=4e-5, step_s=8e-3, context_token_s=5e-8, output_tokens=200.0, capacity_tokens=100_000)
NAMES = [f"r{number}" for number in range(16)]
IDLE = dict.fromkeys(NAMES, Load())


def asked(name: str, *, history: int = 0, root: str | None = None) -> IncomingTurn:
    return IncomingTurn(root or name, name, 50, history)


def rule(made, names=NAMES):
    made.set_members(names)
    return made
