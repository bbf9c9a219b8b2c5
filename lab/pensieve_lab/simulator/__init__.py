"""Simulator of serving: the real scheduler, cache and policies under a virtual clock, on a modelled device.

Owns: device profiles, the time of steps and copies, replicas and routing.
Does not know: jax, tokens, models. The engine's own code makes all decisions. Users and figures belong to
`pensieve_lab.workload`.
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
