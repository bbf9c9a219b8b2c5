"""Which cost model an engine evicts by: measured before, measured at this start, or analytic.

Owns: the order in which profiles are looked for, and the files of those shipped or measured at a start.
Does not know: how costs are used (`cache.order.policies`), or how steps are timed (`device.start_costs`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from pensieve_jax.cache.order.cost import CostModel, CostPoint, CostProfile, CostSubject, MeasuredCostModel
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import ConfigError, StepFailedError
from pensieve_jax.core.user_directories import user_cache_dir
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.device.start_costs import StartSizes, measure_start_costs, start_sizes, too_few_lengths
from pensieve_jax.runtime.executable_environment import environment
from pensieve_jax.runtime.replacing import replacing

_log = logging.getLogger(__name__)
_SHIPPED_DIR = Path(__file__).parent / "cost_profiles"
_POLICIES_WITHOUT_COSTS = ("lru", "conversation", "trailing")
_SHOWN_TOKENS = 4096


class CostChoice(NamedTuple):
    """A cost model and where it comes from.

    Attributes:
      model: what the cache asks.
      kind: "file", "shipped", "cached", "measured at start" or "analytic".
      source: the path of a file, or the name of a shipped profile; None where there is none.
      reason: why this one, for people.
      points: what was measured; None for an analytic model.
    """

    model: CostModel
    kind: str
    source: str | None
    reason: str
    points: tuple[CostPoint, ...] | None = None

    def ratio_at_4096(self, chunk_tokens: int) -> float:
        """Return the cost of the chunk that ends at 4,096 tokens over the cost of the first chunk."""
        return self.model.chunk_cost_s(_SHOWN_TOKENS) / self.model.chunk_cost_s(chunk_tokens)


def shipped_costs(subject: CostSubject) -> CostChoice | None:
    """Return the costs that the package has of this subject, if any."""
    for name, profile in _shipped_profiles().items():
        if profile.subject == subject:
            return _measured(profile.points, "shipped", name, "measured of this model on such a device")
    return None


def needs_costs(config: EngineConfig) -> bool:
    """Return whether an engine of this configuration weighs chunks by what recomputing them costs."""
    return config.stateful and config.cache.policy not in _POLICIES_WITHOUT_COSTS


def costs_before_loading(
    config: EngineConfig, subject: CostSubject, estimated: CostModel, *, is_accelerator: bool
) -> CostChoice | None:
    """Choose what needs no runner; None: `costs_of_runner` has to look.

    Args:
      config: of the engine.
      subject: what a profile must have been measured of.
      estimated: the analytic model.
      is_accelerator: whether times of its steps mean something; those of a CPU are noise.

    Raises:
      ConfigError: `cache.cost_profile` names a file that is no profile, or one of something else.
    """
    given = config.cache.cost_profile
    if given == "analytic":
        return CostChoice(estimated, "analytic", None, "named in cache.cost_profile")
    if given != "auto":
        profile = CostProfile.load(given, subject)
        return _measured(profile.points, "file", given, "named in cache.cost_profile")
    if (shipped := shipped_costs(subject)) is not None:
        return shipped
    if not is_accelerator:
        return CostChoice(estimated, "analytic", None, "no profile is shipped, and CPUs are not measured")
    if not needs_costs(config):
        policy = config.cache.policy if config.stateful else "an engine without state"
        return CostChoice(estimated, "analytic", None, f"not measured: {policy} asks for no costs")
    return None


def costs_of_runner(
    runner: ModelRunner,
    config: EngineConfig,
    subject: CostSubject,
    estimated: CostModel,
    *,
    name: str,
    context_tokens: int,
    progress: Callable[[int, int, str], None],
) -> CostChoice:
    """Load what an earlier start measured of such steps, or measure them now and keep the result.

    Args:
      runner: warm, without any step in flight; its pools are empty afterwards.
      config: of the engine, with the size of its pool.
      subject: what is measured.
      estimated: the analytic model, for where there is nothing to measure or a step fails.
      name: of the model, for people who read the file.
      context_tokens: the longest context that is served.
      progress: called with (number done, number in all, what was done) while it measures.

    Raises:
      StepFailedError: a step failed, and the runner could not be made ready again.
    """
    limits = {
        "gpu_pages": config.cache.gpu_pages,
        "chunk_tokens": config.cache.chunk_tokens,
        "context_tokens": context_tokens,
    }
    sizes = start_sizes(runner.layouts, **limits)
    if (why := too_few_lengths(sizes, **limits)) is not None:
        return CostChoice(estimated, "analytic", None, f"not measured: {why}")
    path = _path(runner, config, subject, sizes)
    if path is not None and (points := _load(path, subject)) is not None:
        return _measured(points, "cached", str(path), "measured by an earlier start of such an engine")
    try:
        points = measure_start_costs(runner, config, subject.vocab_size, sizes, progress)
    except StepFailedError as error:
        _log.warning("costs of recomputing are estimated, since a step to measure them failed: %s", error)
        runner.reset()
        return CostChoice(estimated, "analytic", None, "a step to measure costs failed; see the log")
    kept = path is not None and _save(path, _profile(points, subject, name, sizes))
    return _measured(
        points, "measured at start", str(path) if kept else None, "no profile was shipped or kept"
    )


def _measured(points: tuple[CostPoint, ...], kind: str, source: str | None, reason: str) -> CostChoice:
    return CostChoice(MeasuredCostModel(points), kind, source, reason, points)


@functools.cache
def _shipped_profiles() -> dict[str, CostProfile]:
    """The profiles of the package, by name."""
    return {path.stem: CostProfile.load(path) for path in sorted(_SHIPPED_DIR.glob("*.json"))}


def _path(runner: ModelRunner, config: EngineConfig, subject: CostSubject, sizes: StartSizes) -> Path | None:
    """The file of a measurement of such steps; None where the user has no directory for it.

    Its name depends on all that a step's time depends on: source, versions, devices, settings and sizes.
    """
    directory = _directory(config)
    if directory is None:
        return None
    devices = list(runner.storage.sharding.device_set)
    key = (
        sorted(environment(sorted(devices, key=lambda device: device.id)).items()),
        sorted(dataclasses.asdict(subject).items()),
        [choice and choice.name for choice in runner.kernels],
        len(runner.storage.groups),
        sizes,
    )
    return directory / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.json"


def _directory(config: EngineConfig) -> Path | None:
    """Beside compiled steps, or else in the user's directory of caches."""
    try:
        return Path(config.runner.compilation_cache_dir or user_cache_dir()) / "cost_profiles"
    except RuntimeError as error:
        _log.warning("costs measured at this start are not kept: %s", error)
        return None


def _load(path: Path, subject: CostSubject) -> tuple[CostPoint, ...] | None:
    """What an earlier start has written; None where there is nothing that can be used, which is logged."""
    if not os.path.exists(path):
        return None
    try:
        return CostProfile.load(path, subject).points
    except ConfigError as error:
        _log.warning("%s cannot be used, costs are measured anew: %s", path, error)
        return None


def _save(path: Path, profile: CostProfile) -> bool:
    """Write the file atomically, since several engines may start at once; a failure is logged."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, ".tmp") as temporary:
            profile.save(temporary)
    except OSError as error:
        _log.warning("costs measured at this start are not kept in %s: %s", path.parent, error)
        return False
    return True


def _profile(
    points: tuple[CostPoint, ...], subject: CostSubject, name: str, sizes: StartSizes
) -> CostProfile:
    return CostProfile(
        subject=subject,
        model=name,
        jax_version=jax.__version__,
        command="measured at the start of an engine",
        num_batched_chunks=sizes.num_chunks,
        cost="in_batch",
        curves={"in_batch": points},
    )
