"""What a device needs for a step and for a copy: a few physical coefficients, from a JSON file.

Owns: the coefficients, what they mean, where they come from, and the measurements that they must reproduce.
Does not know: how they make up the time of a step (`step_time`) or of a copy (`transfers`).

A profile is of one model on one device. `source` says whether its coefficients were fitted to measurements,
which the file then names with what it took them from, or derived from published figures of the hardware.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pensieve_jax.core.errors import ConfigError

SOURCES = ("measured", "derived")
LAUNCHES = ("jaxlib", "engine")
"""Whose thread launches a step's kernels; see `runtime.asynchronous_launches`."""

_FORMAT = "pensieve device profile, version 2"
_FIELD = "device_profile"
_NUMBERS = ("both_ways_share", "page_copy_byte_s", "fetch_s")
_DIRECTORY = Path(__file__).parent / "profiles"


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Coefficients of a step's time on the device; all layers together.

    Attributes:
      weight_read_s: reading every weight once, which the smallest step does as well.
      token_s: arithmetic of the dense layers for one padded token, by a device that has rested.
      hot_share: how much longer that takes where arithmetic has been going on for long: under products a
        device lowers its clock.
      hot_s: after how long that is so for 63%, and after how long without products it is forgotten for 63%.
      overlap: p of the smooth maximum (a**p + b**p)**(1/p) of reading weights and arithmetic: the two
        overlap, but less than wholly where neither is much longer.
      kv_read_s: reading the KV state of one token.
      pair_s: arithmetic of one query token that attends to one key.
      span_s: per token of the longest context: what is serial in attention, and shows where rows are few.
      step_s: everything else of a step, whatever its size.
      padded_token_s: everything else, for one padded token.
    """

    weight_read_s: float
    token_s: float
    hot_share: float
    hot_s: float
    overlap: float
    kv_read_s: float
    pair_s: float
    span_s: float
    step_s: float
    padded_token_s: float


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Coefficients of what the serving thread does for a step; all but the last before its launch.

    Attributes:
      step_s: of every step: scheduler, plan, ids into turns.
      row_s: of each row of the step.
      turn_s: of each turn that came since the step before: its prompt, its answer, its user.
      chunk_s: of each chunk that is to be copied, either way: gather or scatter, copy, end.
      launch_s: launching the kernels, while the device computes those that are launched. The thread does it
        itself, or has the time for other things while a thread of jaxlib's does.
      launch_beside_copies_s: the same while chunks are on their way.
    """

    step_s: float
    row_s: float
    turn_s: float
    chunk_s: float
    launch_s: float
    launch_beside_copies_s: float


@dataclass(frozen=True, kw_only=True)
class LinkCosts:
    """One direction between device and pinned host memory.

    Attributes:
      bytes_per_s: of chunks, one after the other.
      latency_s: from the start of a copy to its first byte, where the link was idle.
    """

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class StepFigure:
    """A measured step, which a profile must reproduce.

    Attributes:
      what: in words, with where it is from.
      bucket_tokens: padded query tokens.
      rows: (how many, query tokens, context tokens at the row's end) of rows that are alike.
      measured_s: time on the device.
      tolerance: the largest difference, as a share of `measured_s`.
    """

    what: str
    bucket_tokens: int
    rows: tuple[tuple[int, int, int], ...]
    measured_s: float
    tolerance: float


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """A model on a device.

    Attributes:
      model, device, dtype: what it is a profile of; the model as `random:` presets name it.
      source: "measured", or "derived" from published figures of the hardware.
      provenance: where the figures come from, by keyword: versions, commands, papers, reasoning.
      kv_token_bytes: KV state of one token, all layers.
      step: of a step on the device.
      to_device, to_host: of copies between tiers.
      both_ways_share: of its bandwidth that a copy has left while one runs in the other direction.
      page_copy_byte_s: of the device, for a byte that is gathered from pages or scattered to them.
      hosts: of the serving thread, by whose thread launches kernels (`LAUNCHES`); "jaxlib" at least.
      launches: the one that counts.
      fetch_s: from the end of a step on the device to its ids on the host.
      fitted_runs: names of result documents of served runs, with which coefficients were fitted.
      figures: measured steps.
      num_devices: that share weights, KV state and copies; always 1 in files.
      host_share: of a chunk's bytes, those that it takes in host memory and on the way; always 1 in files.
    """

    model: str
    device: str
    dtype: str
    source: str
    provenance: Mapping[str, str]
    kv_token_bytes: int
    step: StepCosts
    to_device: LinkCosts
    to_host: LinkCosts
    both_ways_share: float
    page_copy_byte_s: float
    hosts: Mapping[str, HostCosts]
    fetch_s: float
    fitted_runs: tuple[str, ...] = ()
    figures: tuple[StepFigure, ...] = ()
    num_devices: int = 1
    launches: str = LAUNCHES[0]
    host_share: float = 1.0

    def host_chunk_bytes(self, chunk_tokens: int) -> int:
        """Bytes of a chunk in host memory and on the way there, all devices together."""
        return round(chunk_tokens * self.kv_token_bytes * self.host_share)

    @property
    def host(self) -> HostCosts:
        """Of the serving thread, as kernels are launched."""
        return self.hosts[self.launches]

    def launching(self, thread: str) -> Self:
        """The same with kernels launched by a thread of `LAUNCHES`; raises ConfigError without its costs."""
        if thread not in self.hosts:
            raise ConfigError(
                "launches", thread, f"one that the profile has a host of: {', '.join(self.hosts)}"
            )
        return dataclasses.replace(self, launches=thread)

    def keeping(self, kv_token_bytes: int, *, rate: float = 1.0) -> Self:
        """The same with a token's KV state in so many bytes; steps read `rate` times the bytes a second."""
        kv_read_s = self.step.kv_read_s * kv_token_bytes / self.kv_token_bytes / rate
        step = dataclasses.replace(self.step, kv_read_s=kv_read_s)
        return dataclasses.replace(self, kv_token_bytes=kv_token_bytes, step=step)

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Read a profile: a path, or the name of one that comes with the package (see `profile_names`).

        Raises:
          ConfigError: it cannot be read, or says what no device does.
        """
        path = _DIRECTORY / f"{name}.json" if str(name) in profile_names() else Path(name)
        return cls(**_Reader(str(name), path).profile())


def profile_names() -> list[str]:
    """Profiles that come with the package."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.json"))


class _Reader:
    """One file, and what is wrong with it."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path

    def profile(self) -> dict[str, Any]:
        """Arguments of a `DeviceProfile`."""
        values = self._json()
        source = values.get("source")
        if source not in SOURCES:
            raise self._error(f"a profile whose source is one of {SOURCES}", f"found {source!r:.60}")
        provenance = values.get("provenance")
        if not isinstance(provenance, dict) or not all(isinstance(v, str) for v in provenance.values()):
            raise self._error("a profile with texts by keyword as 'provenance'", f"found {provenance!r:.60}")
        fields: dict[str, Any] = {name: self._text(values, name) for name in ("model", "device", "dtype")}
        fields |= {name: self._number(values, name) for name in _NUMBERS}
        if not 0 < fields["both_ways_share"] <= 1:
            raise self._error("a profile with both_ways_share above 0 and up to 1")
        return fields | {
            "source": source,
            "provenance": provenance,
            "kv_token_bytes": int(self._number(values, "kv_token_bytes", above=0)),
            "step": self._step(values),
            "to_device": self._link(values, "to_device"),
            "to_host": self._link(values, "to_host"),
            "hosts": self._hosts(values),
            "fitted_runs": tuple(self._names(values, "fitted_runs")),
            "figures": tuple(self._figure(figure) for figure in self._list(values, "figures")),
        }

    def _json(self) -> dict[str, Any]:
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
        except OSError as error:
            names = ", ".join(profile_names())
            raise self._error(
                f"a file that can be read, or one of {names}", error.strerror or str(error)
            ) from error
        except (ValueError, RecursionError) as error:
            raise self._error("a device profile", f"this file is not JSON ({error})") from error
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            found = values.get("format") if isinstance(values, dict) else type(values).__name__
            raise self._error(f"a file of format {_FORMAT!r}", f"found {found!r:.60}")
        return values

    def _step(self, values: Mapping[str, Any]) -> StepCosts:
        part = self._part(values, "step")
        costs = StepCosts(
            **{field.name: self._number(part, field.name) for field in dataclasses.fields(StepCosts)}
        )
        if costs.overlap < 1:
            raise self._error("a profile whose step.overlap is at least 1", f"found {costs.overlap}")
        return costs

    def _hosts(self, values: Mapping[str, Any]) -> dict[str, HostCosts]:
        part = self._part(values, "hosts")
        if LAUNCHES[0] not in part or not set(part) <= set(LAUNCHES):
            limit = f"a profile with hosts of {' and '.join(LAUNCHES)}, the first at least"
            raise self._error(limit, f"found {', '.join(part)}")
        fields = [field.name for field in dataclasses.fields(HostCosts)]
        return {
            thread: HostCosts(**{name: self._number(self._part(part, thread), name) for name in fields})
            for thread in part
        }

    def _link(self, values: Mapping[str, Any], name: str) -> LinkCosts:
        part = self._part(values, name)
        return LinkCosts(
            bytes_per_s=self._number(part, "bytes_per_s", above=0), latency_s=self._number(part, "latency_s")
        )

    def _figure(self, values: Any) -> StepFigure:
        if not isinstance(values, dict):
            raise self._error("a profile whose figures are objects", f"found {values!r:.60}")
        rows = self._list(values, "rows")
        for row in rows:
            if not isinstance(row, list) or len(row) != 3 or not all(type(n) is int and n > 0 for n in row):
                raise self._error("a profile with rows of three numbers above 0", f"found {row!r:.60}")
        return StepFigure(
            what=self._text(values, "what"),
            bucket_tokens=int(self._number(values, "bucket_tokens", above=0)),
            rows=tuple((count, q_len, kv_len) for count, q_len, kv_len in rows),
            measured_s=self._number(values, "measured_s", above=0),
            tolerance=self._number(values, "tolerance"),
        )

    def _part(self, values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        part = values.get(name)
        if not isinstance(part, dict):
            raise self._error(f"a profile with an object {name!r}", f"found {part!r:.60}")
        return part

    def _list(self, values: Mapping[str, Any], name: str) -> list[Any]:
        found = values.get(name, [])
        if not isinstance(found, list):
            raise self._error(f"a profile with a list {name!r}", f"found {found!r:.60}")
        return found

    def _names(self, values: Mapping[str, Any], name: str) -> list[str]:
        found = self._list(values, name)
        if not all(isinstance(one, str) for one in found):
            raise self._error(f"a profile with texts in the list {name!r}", f"found {found!r:.60}")
        return found

    def _text(self, values: Mapping[str, Any], name: str) -> str:
        found = values.get(name)
        if not isinstance(found, str):
            raise self._error(f"a profile with a text {name!r}", f"found {found!r:.60}")
        return found

    def _number(self, values: Mapping[str, Any], name: str, *, above: float | None = None) -> float:
        """A finite number from 0 on, or above `above`."""
        found: Any = values.get(name)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not 0 <= found < math.inf or (above is not None and found <= above):
            limit = "from 0 on" if above is None else f"above {above:g}"
            raise self._error(f"a profile with a finite number {name!r} {limit}", f"found {found!r:.60}")
        return float(found)

    def _error(self, limit: str, hint: str = "") -> ConfigError:
        return ConfigError(_FIELD, self._name, limit, hint)
