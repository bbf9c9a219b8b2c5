"""Device times of a padded batch's launches, each with the bytes that it has to move.

Owns: the launches that are timed, through the runner that engines use, and their bounds.
Does not know: flags, or the report.

A launch that consumes a row is timed after the launch that makes one, whose time is subtracted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from pensieve_jax import SamplingParams
from pensieve_jax.decoding.sampling_rows import SamplerMode
from pensieve_jax.device.row_steps import StepRow, Timed
from pensieve_jax.rebatching import Query
from pensieve_jax.rebatching.config import PAGE_TOKENS
from pensieve_jax.rebatching.device.runner import DeviceRunner
from pensieve_jax.rebatching.launches import (
    Decode,
    FreeRow,
    Insert,
    PackedStep,
    Park,
    Prefill,
    Resize,
    Return,
    Suspend,
)
from pensieve_jax.rebatching.ring import Relayout
from pensieve_jax.rebatching.ring_shapes import RingShape, lengths_up_to
from pensieve_lab.rebatching.rings import fill
from pensieve_lab.steps.bounds import bound_s, operations
from pensieve_lab.steps.ceilings import Ceilings

UNITS = {
    "launch_s": "seconds per launch of several back-to-back launches; median of samples",
    "bound_bytes": "bytes read and written; decode: weights, and keys and values of all columns of all rows; "
    "prefill: weights, and its rows; others: the moved bytes, twice on the device and once over the link",
    "bound_s": "bound_bytes at the bandwidth of a copy on the device, or over its link to the host",
    "arithmetic_s": "prefill only: time of all operations at their roofline limits, padding included",
    "share_of_bound": "larger of bound_s and arithmetic_s, over launch_s",
}
_SAMPLES, _LAUNCHES, _WARM_UPS = 5, 8, 1
_MOMENT_S = 0.3
_SERIAL = 1


class Copies(NamedTuple):
    """Bandwidths in bytes/s: of a copy on the device (read plus written), and over the host link per
    direction."""

    on_device: float
    to_host: float
    to_device: float


class Launched(NamedTuple):
    """Timed launch.

    Attributes:
      name, batch, length: kind and size of the launch; a move has the length of its row.
      launch_s: seconds of each sample.
      num_bytes: bytes that have to be moved.
      bytes_per_s: bandwidth of the bound.
      arithmetic_s: arithmetic bound of a prefill, else 0.
    """

    name: str
    batch: int
    length: int
    launch_s: list[float]
    num_bytes: int
    bytes_per_s: float
    arithmetic_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by the names of `UNITS`."""
        median_s, at_least_s = statistics.median(self.launch_s), self.num_bytes / self.bytes_per_s
        return {
            "launch": self.name,
            "batch": self.batch,
            "length": self.length,
            "launch_s": median_s,
            "launch_s_samples": self.launch_s,
            "bound_bytes": self.num_bytes,
            "bound_s": at_least_s,
            "arithmetic_s": self.arithmetic_s or None,
            "share_of_bound": max(at_least_s, self.arithmetic_s) / median_s if median_s > 0 else None,
        }


class LaunchTimes:
    """Launch times of one runner, measured with its longest ring.

    Attributes:
      copies: bandwidths of the bounds.
    """

    def __init__(self, runner: DeviceRunner, ceilings: Ceilings) -> None:
        """Measure the host link; `ceilings` must be of the same device."""
        self._runner, self._ceilings = runner, ceilings
        self._shapes = runner.ring_shapes.shapes
        self._shape = self._shapes[-1]
        self._token_bytes = runner.storage.token_bytes
        self.copies = Copies(ceilings.copy_bytes_per_s, *self._link())

    def measure(self) -> Iterator[Launched]:
        """Time every kind of launch in sequence."""
        fill(self._runner, self._shape)
        yield self._decode()
        for length in lengths_up_to(self._shapes, self._shape.length):
            yield from self._rows(length)
        for shape in self._runner.programs.prefill:
            yield self._prefill(shape.num_rows, shape.length)
        if len(self._shapes) > 1:
            yield self._resize(self._shapes[-2], self._shape)
        self._runner.reset(())

    def _decode(self) -> Launched:
        batch, length = self._shape
        num_tokens = length - 1
        words = PackedStep(self._runner.layout, place=num_tokens)
        for row in range(batch):
            words.add(row, _query(num_tokens), num_tokens, length, num_tokens + 1)
        decode = Decode(words.words, SamplerMode(), ())
        timed = Timed(lambda: self._runner.launch(decode), jax.block_until_ready)
        num_bytes = self._runner.weights_bytes + batch * length * self._token_bytes
        return self._launched("decode", batch, length, _samples(timed), num_bytes)

    def _rows(self, length: int) -> Iterator[Launched]:
        """Time a row out of the ring, to host memory and back, and into the ring."""
        runner, row_bytes = self._runner, length * self._token_bytes
        out = Suspend(_SERIAL, 0, np.arange(length, dtype=np.int32), length)
        into = Insert(_SERIAL, 0, 0, length, 0)

        def take() -> None:
            runner.launch(out)

        def take_and_insert() -> None:
            runner.launch(out)
            runner.launch(into)

        self._behind_a_step()
        wait_s = statistics.median(_once_s(self._behind_a_step) for _ in range(_SAMPLES))
        together_s = _in_a_row(take, self._behind_a_step)
        take_s = [one - wait_s / _LAUNCHES for one in together_s]
        yield self._launched("take a row out", 1, length, take_s, 2 * row_bytes)
        median_s = statistics.median(take_s)
        both_s = _in_a_row(take_and_insert, lambda: jax.block_until_ready(runner.ring))
        insert_s = [one - median_s for one in both_s]
        yield self._launched("insert a row", 1, length, insert_s, 2 * row_bytes)
        yield from self._through_host(out, into, statistics.median(insert_s))

    def _behind_a_step(self) -> None:
        """Wait for all launches by fetching a step after them; a row alone cannot be waited for."""
        decode = Decode(PackedStep(self._runner.layout).words, SamplerMode(), ())
        self._runner.fetch(self._runner.launch(decode))

    def _through_host(self, out: Suspend, into: Insert, insert_s: float) -> Iterator[Launched]:
        runner = self._runner
        length, row_bytes = out.num_tokens, out.num_tokens * self._token_bytes
        park_s, return_s = [], []
        for _ in range(_WARM_UPS + _SAMPLES):
            runner.launch(out)
            self._behind_a_step()
            park_s.append(_once_s(lambda: runner.launch(Park(_SERIAL, waits=True))))

            def back() -> None:
                runner.launch(Return(_SERIAL))
                runner.launch(into)
                jax.block_until_ready(runner.ring)

            return_s.append(_once_s(back) - insert_s)
        kept = slice(_WARM_UPS, None)
        to_host, to_device = self.copies.to_host, self.copies.to_device
        yield Launched("park a row", 1, length, park_s[kept], row_bytes, to_host)
        yield Launched("bring a row back", 1, length, return_s[kept], row_bytes, to_device)

    def _prefill(self, num_rows: int, length: int) -> Launched:
        runner, model = self._runner, self._runner.storage.model
        serials = tuple(range(_SERIAL, _SERIAL + num_rows))
        token_ids = np.random.default_rng(0).integers(0, model.vocab_size, num_rows * length, np.int32)
        words = PackedStep(runner.layout)
        for row in range(num_rows):
            words.add(row, _query(length), length - 1, 1, length)
        launch = Prefill(
            serials, length, num_rows, token_ids, words.words, SamplerMode(), (), num_rows * length
        )
        timed = Timed(lambda: runner.launch(launch), jax.block_until_ready)
        samples = _samples(timed)
        for serial in serials:
            runner.launch(FreeRow(serial))
        found = operations(
            model,
            [StepRow(row, 0, length) for row in range(num_rows)],
            num_samples=num_rows,
            bytes_per_number=runner.storage.dtype.itemsize,
            kv_token_bytes=self._token_bytes * runner.storage.mesh.devices.size,
            num_devices=runner.storage.mesh.devices.size,
        )
        num_bytes = runner.weights_bytes + num_rows * length * self._token_bytes
        least_s = bound_s(found, self._ceilings)
        return self._launched("prefill", num_rows, length, samples, num_bytes)._replace(arithmetic_s=least_s)

    def _resize(self, old: RingShape, new: RingShape) -> Launched:
        """Time a change of shape; the bytes count the old ring, truncated or repeated to the new batch."""
        rows = np.arange(new.batch, dtype=np.int32) % old.batch
        columns = np.full(new.length, -1, np.int32)
        columns[: old.length] = np.arange(old.length)
        taken_s = []
        for _ in range(_WARM_UPS + _SAMPLES):
            fill(self._runner, old)
            taken_s.append(_once_s(lambda: self._relayout(new, Relayout(rows, columns))))
        num_bytes = new.batch * (old.length + new.length) * self._token_bytes
        name = f"from {old.batch} x {old.length} to {new.batch} x {new.length}"
        return self._launched(name, *new, taken_s[_WARM_UPS:], num_bytes)

    def _relayout(self, shape: RingShape, relayout: Relayout) -> None:
        self._runner.launch(Resize(shape, relayout))
        jax.block_until_ready(self._runner.ring)

    def _launched(
        self, name: str, batch: int, length: int, launch_s: list[float], num_bytes: int
    ) -> Launched:
        return Launched(name, batch, length, launch_s, num_bytes, self.copies.on_device)

    def _link(self) -> tuple[float, float]:
        """Return the host link's bandwidth in bytes/s for one large array, out and back."""
        storage = self._runner.storage
        row = storage.row(self._shape.length)
        array = jax.numpy.zeros(row.shape, row.dtype, device=row.sharding)
        out_s, back_s = [], []
        for _ in range(_WARM_UPS + _SAMPLES):
            start_s = time.perf_counter()
            on_host = jax.device_put(array, storage.host_sharding).block_until_ready()
            middle_s = time.perf_counter()
            array = jax.device_put(on_host, storage.row_sharding).block_until_ready()
            out_s.append(middle_s - start_s)
            back_s.append(time.perf_counter() - middle_s)
        medians = (statistics.median(one[_WARM_UPS:]) for one in (out_s, back_s))
        to_host, to_device = (array.nbytes / storage.mesh.devices.size / one for one in medians)
        return to_host, to_device


def _query(num_tokens: int) -> Query:
    """Make a query whose next token is sampled greedily."""
    return Query(
        _SERIAL,
        [0] * num_tokens,
        SamplingParams(max_tokens=2, ignore_eos=True),
        seed=0,
        priority=0,
        ending_ids=(),
        max_context_tokens=num_tokens + PAGE_TOKENS,
        tokenizer=None,
    )


def _samples(timed: Timed) -> list[float]:
    """Return seconds per launch; the number of launches in a row is limited to about `_MOMENT_S`."""
    pilot_s = min(timed.once_s() for _ in range(1 + _WARM_UPS))
    num_launches = max(1, min(_LAUNCHES, int(_MOMENT_S / pilot_s)))
    return [timed.sample_s(num_launches) for _ in range(_SAMPLES)]


def _in_a_row(launch: Callable[[], None], settle: Callable[[], Any]) -> list[float]:
    """Return seconds per launch of launches that only `settle` can wait for; its time is included."""

    def several() -> None:
        for _ in range(_LAUNCHES):
            launch()
        settle()

    for _ in range(_WARM_UPS):
        several()
    return [_once_s(several) / _LAUNCHES for _ in range(_SAMPLES)]


def _once_s(work: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
