"""The refusal of pages that do not fit a device's memory beside weights and steps.

Owns: the memory arithmetic, the memory reserved for chunks in transit and for exchanges, and the error
message that says what fits and what to change.
Does not know: how much a step takes (`runtime.device_memory` asks the executables), or how a number of pages
is derived (`sizing`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import jax

from pensieve_jax.core.errors import ConfigError, StepFailedError
from pensieve_jax.device.transfers.copy_batches import max_padding
from pensieve_jax.runtime import device_memory
from pensieve_jax.runtime.errors import in_a_line, is_out_of_memory, requested_bytes

MIN_PAGES: Final = 2
"""The fewest pages of an engine."""
_OTHER_WAYS = "raise runner.tensor_parallel_size or XLA_PYTHON_CLIENT_MEM_FRACTION, JAX's share of the device"
# Memory that a device uses beside arrays when there are several: buffers that peers write to, and those of
# compilation, which autotunes products. An estimate; `pensieve_lab.programs.profile_parallel` measures it.
_EXCHANGE_BYTES = 2**30


def staging_bytes(cpu_pages: int, num_staged_pages: int, page_bytes: int) -> int:
    """Return the bytes reserved on a device for chunks in transit; 0 without a host tier.

    They hold one set of chunks on its way out and two on their way in: chunks that a step scatters are freed
    after the step, but the next copies start before it. A gathered batch also has padding, which is freed
    when the gather has run.
    """
    return (3 * num_staged_pages + max_padding(num_staged_pages)) * page_bytes if cpu_pages else 0


def reserved_bytes(given: int | None, num_devices: int) -> int:
    """Return `cache.gpu_reserved_bytes`, or the default for `num_devices` devices where it is None."""
    if given is not None:
        return given
    return _EXCHANGE_BYTES if num_devices > 1 else 0


class PagesDoNotFitError(ConfigError):
    """A device has no memory for the pages of a configuration beside its steps.

    Attributes:
      most: the most pages that fit; fewer than two if none do.
    """

    most: int = 0


@dataclass(frozen=True)
class PageBudget:
    """The memory of one device as divided among weights, pages, chunks in transit and steps.

    Attributes:
      device: the device with the least memory among those that hold the model.
      gpu_pages: number of pages wanted, without the dummy page.
      fraction: the share of the device's memory that `gpu_pages` was derived from; None if they were given.
      page_bytes: bytes of a page.
      weights_bytes: bytes of the model's weights.
      staging_bytes: bytes of chunks in transit.
      max_step_tokens: number of tokens of the largest step.
      reserved_bytes: bytes that derived pages leave to exchanges between devices.
      counts_bytes: bytes of counts of ids, and of other arrays that adjust logits.
    """

    device: jax.Device
    gpu_pages: int
    fraction: float | None
    page_bytes: int
    weights_bytes: int
    staging_bytes: int
    max_step_tokens: int
    reserved_bytes: int = 0
    counts_bytes: int = 0

    def check(self, step_bytes: int = 0) -> None:
        """Refuse pages that do not fit beside everything else, if the device's memory limit is known.

        Args:
          step_bytes: bytes that the largest step takes beside weights and pages; 0 before that is known.

        Raises:
          PagesDoNotFitError: too many pages; the message names the given value and the most that would fit.
        """
        limit_bytes = device_memory.memory_limit_bytes(self.device)
        if limit_bytes is not None and self._left_bytes(limit_bytes) < step_bytes:
            raise self._too_many(limit_bytes, step_bytes)

    @contextlib.contextmanager
    def out_of_memory_as_config_error(self, step_bytes: Callable[[], int]) -> Iterator[None]:
        """Refuse the number of pages if memory runs out while steps are prepared inside this block.

        Args:
          step_bytes: returns the bytes of `check` for what is compiled so far.

        Raises:
          PagesDoNotFitError: as in `check`. Other errors pass unchanged.
        """
        try:
            yield
        except (jax.errors.JaxRuntimeError, StepFailedError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._ran_out(max(step_bytes(), requested_bytes(error)), error) from error

    def no_pools(self, error: Exception) -> ConfigError:
        """Return the error for pages that the device could not even allocate."""
        pools = f"{_size(self._pages_bytes)} for them could not be allocated"
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
        """Return the bytes left beside everything but steps; negative if that does not fit."""
        return limit_bytes - self._fixed_bytes - self._pages_bytes

    @property
    def _fixed_bytes(self) -> int:
        """Bytes that do not depend on the number of pages."""
        return self.weights_bytes + self.staging_bytes + self.counts_bytes

    def _too_many(self, limit_bytes: int, step_bytes: int) -> PagesDoNotFitError:
        """Return the error with the number of pages that would fit by the memory arithmetic."""
        reserved_bytes = 0 if self.fraction is None else self.reserved_bytes
        most = (limit_bytes - step_bytes - reserved_bytes - self._fixed_bytes) // self.page_bytes - 1
        if most < MIN_PAGES:
            fits = f"{self._less}, and then not even {MIN_PAGES} pages fit"
        elif self.fraction is not None:
            fits = f"lower, for at most {most:,} pages"
        else:
            fits = f"at most {most:,}"
        counts = f", counts of ids ({_size(self.counts_bytes)})" if self.counts_bytes else ""
        pages = f"{self.gpu_pages:,} pages ({_size(self._pages_bytes)})"
        held = f"weights ({_size(self.weights_bytes)}){counts} and {pages}"
        if self.staging_bytes:
            held = f"chunks in transit ({_size(self.staging_bytes)}), {held}"
        if step_bytes:
            left = f"{_size(max(self._left_bytes(limit_bytes), 0))} of {_size(limit_bytes)} is left"
            why = f"{self._steps} need {_size(step_bytes)} beside {held}, and {left}"
        else:
            why = f"{held} are more than the {_size(limit_bytes)} that JAX may use of the device"
        error = self._refusal(f"{fits}: {why}", self._hint(most, of_steps=step_bytes > 0))
        error.most = most
        return error

    def _ran_out(self, step_bytes: int, error: Exception) -> ConfigError:
        """Return the error of the memory arithmetic if that explains it, else one that says what happened.

        Memory can run out earlier than calculated: it may be fragmented, or other processes may use it.
        """
        limit_bytes = device_memory.memory_limit_bytes(self.device)
        if limit_bytes is not None and step_bytes > self._left_bytes(limit_bytes):
            return self._too_many(limit_bytes, step_bytes)
        need = f"need {_size(step_bytes)}, which" if step_bytes else "need more than"
        left = "the device" if limit_bytes is None else f"the device, {_size(limit_bytes)} for JAX,"
        limit = (
            f"{self._less}: {self._steps} {need} {left} did not have beside "
            f"{self.gpu_pages:,} pages ({_size(self._pages_bytes)})"
        )
        return self._refusal(limit, f"{self._hint(MIN_PAGES, of_steps=True)}; {in_a_line(error)}")

    def _hint(self, most: int, *, of_steps: bool) -> str:
        names = ["it"] if most >= MIN_PAGES else []
        names += ["scheduler.max_num_batched_tokens"] if of_steps else []
        return f"lower {' or '.join(names)}, or {_OTHER_WAYS}" if names else _OTHER_WAYS

    def _refusal(self, limit: str, hint: str) -> PagesDoNotFitError:
        if self.fraction is None:
            return PagesDoNotFitError("cache.gpu_pages", self.gpu_pages, limit, hint)
        return PagesDoNotFitError("cache.gpu_memory_fraction", self.fraction, limit, hint)


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale / 10:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:,} bytes"
