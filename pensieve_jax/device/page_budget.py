"""How many pages a device's memory holds beside weights and steps, and refusals of more pages than that.

Owns: the sums, what is set aside for chunks in transit and for exchanges, and the one line that says what
fits and what to change.
Does not know: how much a step takes; `runtime.device_memory` asks its executables.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax

from pensieve_jax.core.errors import ConfigError, StepFailedError
from pensieve_jax.device.transfers.copy_batches import max_padding
from pensieve_jax.runtime import device_memory
from pensieve_jax.runtime.errors import in_a_line, is_out_of_memory, requested_bytes

_LEAST_PAGES = 2
_OTHER_WAYS = "raise runner.tensor_parallel_size or XLA_PYTHON_CLIENT_MEM_FRACTION, JAX's share of the device"
# What a device of several takes beside arrays: buffers that peers write to, and those of compiling, which
# tries out products. An estimate; `pensieve_lab.programs.profile_parallel` says what was taken.
_EXCHANGE_BYTES = 2**30


def staging_bytes(cpu_pages: int, num_staged_pages: int, page_bytes: int) -> int:
    """What is set aside for chunks in transit on a device: one set out, and two in; none without a host tier.

    What a step scatters is freed after it, and the next copies are started before it. A batch that is
    gathered has padding, which is freed when it has run.
    """
    return (3 * num_staged_pages + max_padding(num_staged_pages)) * page_bytes if cpu_pages else 0


def reserved_bytes(given: int | None, num_devices: int) -> int:
    """`cache.gpu_reserved_bytes`, or what None stands for on so many devices."""
    if given is not None:
        return given
    return _EXCHANGE_BYTES if num_devices > 1 else 0


def num_pages_in(
    fraction: float,
    devices: Sequence[jax.Device],
    page_bytes: int,
    staging_bytes: int,
    reserved_bytes: int = 0,
) -> int:
    """Pages that fit into `fraction` of every device's memory beside what is in use there already.

    Args:
      fraction: `cache.gpu_memory_fraction`.
      devices: with the weights on them, and nothing that goes away.
      page_bytes: a device's share of a page.
      staging_bytes: that chunks in transit will take of each.
      reserved_bytes: of each, that is for neither.

    Raises:
      ConfigError: a device does not say what memory it has, or not even two pages fit.
    """
    field = "cache.gpu_memory_fraction"
    found = []
    for device in devices:
        limit_bytes = device_memory.memory_limit_bytes(device)
        if limit_bytes is None:
            limit = f"None: {device.device_kind!r} does not say how much memory it has"
            raise ConfigError(field, fraction, limit, "give cache.gpu_pages")
        used_bytes = (device.memory_stats() or {}).get("bytes_in_use", 0)
        left_bytes = int(fraction * limit_bytes) - used_bytes - staging_bytes - reserved_bytes
        num_pages = left_bytes // page_bytes - 1
        if num_pages < _LEAST_PAGES:
            beside = f", chunks in transit {staging_bytes:,}" if staging_bytes else ""
            beside += f", exchanges {reserved_bytes:,}" if reserved_bytes else ""
            limit = (
                f"more: of the device's {limit_bytes:,} bytes, what is loaded takes {used_bytes:,}{beside}, "
                f"and a page {page_bytes:,}"
            )
            raise ConfigError(field, fraction, limit, "or raise runner.tensor_parallel_size")
        found.append(num_pages)
    return min(found)


@dataclass(frozen=True)
class PageBudget:
    """Bytes are one device's.

    Attributes:
      device: of those that the model is on, the one with the least memory.
      gpu_pages: as many as there shall be, beside a dummy.
      fraction: the `cache.gpu_memory_fraction` that they were made of, or None.
      page_bytes: of a page.
      weights_bytes: of the model.
      staging_bytes: of chunks in transit.
      max_step_tokens: of the largest step.
      reserved_bytes: that no page may be made of where a fraction says how many there are.
    """

    device: jax.Device
    gpu_pages: int
    fraction: float | None
    page_bytes: int
    weights_bytes: int
    staging_bytes: int
    max_step_tokens: int
    reserved_bytes: int = 0

    def check(self, step_bytes: int = 0) -> None:
        """Refuse pages that do not fit beside everything else, where the device's limit is known.

        Args:
          step_bytes: that the largest step takes beside weights and pages; 0 before that is known.

        Raises:
          ConfigError: names what was given, and the most that would fit.
        """
        limit_bytes = device_memory.memory_limit_bytes(self.device)
        if limit_bytes is not None and self._left_bytes(limit_bytes) < step_bytes:
            raise self._too_many(limit_bytes, step_bytes)

    @contextlib.contextmanager
    def refusing(self, step_bytes: Callable[[], int]) -> Iterator[None]:
        """Refuse pages beside which memory runs out while steps are got ready.

        Args:
          step_bytes: as of `check`, of what is compiled by the time it is called.

        Raises:
          ConfigError: as of `check`. What else goes wrong is raised as it is.
        """
        try:
            yield
        except (jax.errors.JaxRuntimeError, StepFailedError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._ran_out(max(step_bytes(), requested_bytes(error)), error) from error

    def no_pools(self, error: Exception) -> ConfigError:
        """The device did not even give memory for the pages."""
        pools = f"{_size(self._pages_bytes)} for them could not be had"
        return self._refusal(f"{self._less}: {pools}", in_a_line(error))

    @property
    def _pages_bytes(self) -> int:
        return (self.gpu_pages + 1) * self.page_bytes

    @property
    def _less(self) -> str:
        return "fewer" if self.fraction is None else "lower"

    @property
    def _steps(self) -> str:
        return f"steps of up to {self.max_step_tokens} tokens"

    def _left_bytes(self, limit_bytes: int) -> int:
        """Beside weights, pages and chunks in transit; negative where these are too much already."""
        return limit_bytes - self.weights_bytes - self.staging_bytes - self._pages_bytes

    def _too_many(self, limit_bytes: int, step_bytes: int) -> ConfigError:
        """By the sums: so many would fit."""
        fraction = math.floor(100 * (limit_bytes - step_bytes) / limit_bytes) / 100
        room_bytes = limit_bytes - step_bytes
        if self.fraction is not None:
            room_bytes = int(fraction * limit_bytes) - self.reserved_bytes
        most = (room_bytes - self.weights_bytes - self.staging_bytes) // self.page_bytes - 1
        if most < _LEAST_PAGES:
            fits = f"{self._less}, and then not even {_LEAST_PAGES} pages fit"
        elif self.fraction is not None:
            fits = f"at most {fraction:.2f} ({most:,} pages)"
        else:
            fits = f"at most {most:,}"
        held = (
            f"weights ({_size(self.weights_bytes)}) and {self.gpu_pages:,} pages ({_size(self._pages_bytes)})"
        )
        if self.staging_bytes:
            held = f"chunks in transit ({_size(self.staging_bytes)}), {held}"
        if step_bytes:
            left = f"{_size(max(self._left_bytes(limit_bytes), 0))} of {_size(limit_bytes)} is left"
            why = f"{self._steps} need {_size(step_bytes)} beside {held}, and {left}"
        else:
            why = f"{held} are more than the {_size(limit_bytes)} that JAX may use of the device"
        return self._refusal(f"{fits}: {why}", self._hint(most, of_steps=step_bytes > 0))

    def _ran_out(self, step_bytes: int, error: Exception) -> ConfigError:
        """By the sums if these say it, else by what happened: memory is in pieces, and others use it, too."""
        limit_bytes = device_memory.memory_limit_bytes(self.device)
        if limit_bytes is not None and step_bytes > self._left_bytes(limit_bytes):
            return self._too_many(limit_bytes, step_bytes)
        need = f"need {_size(step_bytes)}, which" if step_bytes else "need more than"
        left = "the device" if limit_bytes is None else f"the device, {_size(limit_bytes)} for JAX,"
        limit = (
            f"{self._less}: {self._steps} {need} {left} did not have beside "
            f"{self.gpu_pages:,} pages ({_size(self._pages_bytes)})"
        )
        return self._refusal(limit, f"{self._hint(_LEAST_PAGES, of_steps=True)}; {in_a_line(error)}")

    def _hint(self, most: int, *, of_steps: bool) -> str:
        names = ["it"] if most >= _LEAST_PAGES else []
        names += ["scheduler.max_num_batched_tokens"] if of_steps else []
        return f"lower {' or '.join(names)}, or {_OTHER_WAYS}" if names else _OTHER_WAYS

    def _refusal(self, limit: str, hint: str) -> ConfigError:
        if self.fraction is None:
            return ConfigError("cache.gpu_pages", self.gpu_pages, limit, hint)
        return ConfigError("cache.gpu_memory_fraction", self.fraction, limit, hint)


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale / 10:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:,} bytes"
