"""The real scheduler, cache and policies under a virtual clock, on a device that is only a few coefficients.

Owns: device profiles, the time of steps and copies, replicas and routing.
Does not know: jax, tokens, models. Decisions are the engine's own code; this package decides nothing. Who
sends what and what is reported is `pensieve_lab.workload`'s.
"""

from pensieve_lab.simulator.figures import figures
from pensieve_lab.simulator.profile import DeviceProfile, profile_names
from pensieve_lab.simulator.replica import Replica
from pensieve_lab.simulator.routing import ROUTERS
from pensieve_lab.simulator.simulation import Outcome, Scenario, run, simulate

__all__ = [
    "ROUTERS",
    "DeviceProfile",
    "Outcome",
    "Replica",
    "Scenario",
    "figures",
    "profile_names",
    "run",
    "simulate",
]
