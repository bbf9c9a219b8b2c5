"""The choice of an engine's cost model: measured before, measured at this start, or analytic.

Owns: the order in which profiles are looked up, and the files of shipped profiles and of those measured at a
start.
Does not know: how costs are used (`cache.order.policies`), or how steps are timed (`device.start_costs`).
Called by `assembly`.
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
    """A cost model and its origin.

    Attributes:
      model: cost model for the cache.
      kind: "file", "shipped", "cached", "measured at start" or "analytic".
      source: path of a file, or name of a shipped profile; None without either.
      reason: reason of the choice, for users.
      points: measured points; None for an analytic model.
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
    """Return the package's costs for this subject, if any."""
    for name, profile in _shipped_profiles().items():
        if profile.subject == subject:
            return _measured(
                profile.points, "shipped", name, "measured for this model on this kind of device"
            )
    return None


def needs_costs(config: EngineConfig) -> bool:
    """Return whether an engine of this configuration uses costs, for eviction or the times of prompts."""
    evicts_by_cost = config.stateful and config.cache.policy not in _POLICIES_WITHOUT_COSTS
    scheduler = config.scheduler
    return evicts_by_cost or scheduler.prompt_order == "work_left" or scheduler.target_tpot_ms is not None


def costs_before_loading(
    config: EngineConfig, subject: CostSubject, estimated: CostModel, *, is_accelerator: bool
) -> CostChoice | None:
    """Choose a cost model that needs no runner; returns None if `costs_of_runner` must choose.

    Args:
      config: configuration of the engine.
      subject: model and hardware of a valid profile.
      estimated: the analytic model.
      is_accelerator: whether the device is an accelerator; step times of a CPU are too noisy.

    Raises:
      ConfigError: `cache.cost_profile` names an invalid profile, or one of another subject.
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
        policy = config.cache.policy if config.stateful else "a stateless engine"
        reason = f"not measured: neither {policy} nor prompts by arrival use costs"
        return CostChoice(estimated, "analytic", None, reason)
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
    """Load the measurement of an earlier start with the same steps, or measure now and store the result.

    Args:
      runner: a warm runner without a step in flight; its pools are empty afterwards.
      config: configuration of the engine, with the size of its pool.
      subject: model and hardware to measure.
      estimated: the analytic model, used if too few lengths can be measured or a step fails.
      name: name of the model, for readers of the file.
      context_tokens: the longest context.
      progress: called with (number done, total number, what was done) during the measurement.

    Raises:
      StepFailedError: a step failed, and the runner could not be reset.
    """
    limits = {
        "gpu_pages": config.cache.num_gpu_pages,
        "chunk_tokens": config.cache.chunk_tokens,
        "context_tokens": context_tokens,
    }
    sizes = start_sizes(runner.layouts, **limits)
    if (why := too_few_lengths(sizes, **limits)) is not None:
        return CostChoice(estimated, "analytic", None, f"not measured: {why}")
    path = _path(runner, config, subject, sizes)
    if path is not None and (points := _load(path, subject)) is not None:
        return _measured(points, "cached", str(path), "measured by an earlier start of the same engine")
    try:
        points = measure_start_costs(runner, config, subject.vocab_size, sizes, progress)
    except StepFailedError as error:
        _log.warning("recomputation costs are estimated, because a step to measure them failed: %s", error)
        runner.reset()
        return CostChoice(estimated, "analytic", None, "a step to measure costs failed; see the log")
    is_saved = path is not None and _save(path, _profile(points, subject, name, sizes))
    return _measured(
        points, "measured at start", str(path) if is_saved else None, "no profile was shipped or stored"
    )


def _measured(points: tuple[CostPoint, ...], kind: str, source: str | None, reason: str) -> CostChoice:
    return CostChoice(MeasuredCostModel(points), kind, source, reason, points)


@functools.cache
def _shipped_profiles() -> dict[str, CostProfile]:
    """Load the package's profiles, by name."""
    return {path.stem: CostProfile.load(path) for path in sorted(_SHIPPED_DIR.glob("*.json"))}


def _path(runner: ModelRunner, config: EngineConfig, subject: CostSubject, sizes: StartSizes) -> Path | None:
    """Return the file of a measurement of these steps; None if the user has no directory for it.

    Its name is a hash of everything that affects a step's time: source code, versions, devices, settings and
    sizes.
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
    """Return the directory of measurements: beside compiled steps, or in the user's cache directory."""
    try:
        return Path(config.runner.compilation_cache_dir or user_cache_dir()) / "cost_profiles"
    except RuntimeError as error:
        _log.warning("costs measured at this start are not stored: %s", error)
        return None


def _load(path: Path, subject: CostSubject) -> tuple[CostPoint, ...] | None:
    """Load a measurement of an earlier start; None without a valid file, and an invalid one is logged."""
    if not os.path.exists(path):
        return None
    try:
        return CostProfile.load(path, subject).points
    except ConfigError as error:
        _log.warning("%s cannot be used, so costs are measured again: %s", path, error)
        return None


def _save(path: Path, profile: CostProfile) -> bool:
    """Write the file atomically, since several engines may start at once; a failure is logged."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, ".tmp") as temporary:
            profile.save(temporary)
    except OSError as error:
        _log.warning("costs measured at this start are not stored in %s: %s", path.parent, error)
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
