"""The real scheduler, cache and policies under a virtual clock, on a device that is only a few coefficients.

Owns: device profiles, the time of steps and copies, users who think, replicas and routing, what is reported.
Does not know: jax, tokens, models. Decisions are the engine's own code; this package decides nothing.
Called by: `scripts/simulate.py` and experiments.
"""

from pensieve_jax.simulator.client import Client
from pensieve_jax.simulator.figures import UNITS, answer_figures, figures, throughput
from pensieve_jax.simulator.profile import DeviceProfile, profile_names
from pensieve_jax.simulator.replica import Replica
from pensieve_jax.simulator.routing import ROUTERS
from pensieve_jax.simulator.simulation import Outcome, Scenario, run, simulate
from pensieve_jax.simulator.step_totals import StepLog, Steps, StepTotals, add_steps, step_figures
from pensieve_jax.simulator.turns import Answer, Turn

__all__ = [
    "ROUTERS",
    "UNITS",
    "Answer",
    "Client",
    "DeviceProfile",
    "Outcome",
    "Replica",
    "Scenario",
    "StepLog",
    "StepTotals",
    "Steps",
    "Turn",
    "add_steps",
    "answer_figures",
    "figures",
    "profile_names",
    "run",
    "simulate",
    "step_figures",
    "throughput",
]
