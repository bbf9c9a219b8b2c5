"""Device profiles: a few physical coefficients of steps and copies, read from a JSON file.

Owns: the coefficients, their meaning and origin, and the measurements that they must reproduce.
Does not know: how they make up the time of a step (`step_time`) or of a copy (`transfers`).

A profile belongs to one model on one device. `source` says whether its coefficients were fitted to
measurements, which the file then names together with what was taken from them, or derived from published
hardware figures.
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
from pensieve_lab.simulator.attention_tiles import TileCosts

SOURCES = ("measured", "derived")
LAUNCHES = ("jaxlib", "engine")
"""Threads that may launch a step's kernels; see `runtime.asynchronous_launches`."""

_FORMAT = "pensieve device profile, version 2"
_FIELD = "device_profile"
_NUMBERS = ("both_ways_share", "page_copy_byte_s", "fetch_s")
_IN_BYTES = "in_bytes"  # of tiles; `DeviceProfile.keeping` sets it
_DIRECTORY = Path(__file__).parent / "profiles"


@dataclass(frozen=True, kw_only=True)
class ExpertCosts:
    """Reading of a mixture of experts. A step reads the experts that its tokens choose; all are equally
    likely.

    Attributes:
      num_experts: experts of a layer.
      num_chosen: experts of a token.
      read_s: time to read all experts of all layers, beside `StepCosts.weight_read_s`.
    """

    num_experts: int
    num_chosen: int
    read_s: float

    def step_read_s(self, num_tokens: int) -> float:
        """Return the time to read the experts of a step with `num_tokens`, without padding."""
        missed: float = (1 - self.num_chosen / self.num_experts) ** num_tokens
        return self.read_s * (1 - missed)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Coefficients of a step's time on the device, for all layers together.

    Attributes:
      weight_read_s: time to read every weight once, except experts, which even the smallest step does.
      token_s: time of the dense layers' arithmetic per padded token, on a rested device.
      hot_share: relative slowdown after sustained arithmetic: a device lowers its clock under matrix
      products.
      hot_s: time constant of this heating, and of cooling without products (63% after `hot_s`).
      overlap: p of the smooth maximum (a**p + b**p)**(1/p) of reading weights and arithmetic. The two
        overlap, but not fully if they take about as long.
      kv_read_s: time to read the KV cache of one token.
      pair_s: time of attention arithmetic per query-key pair.
      span_s: time per token of the longest context: the serial part of attention, visible with few rows.
      step_s: fixed time of everything else in a step.
      padded_token_s: time of everything else per padded token.
      tiles: attention of prompts by tiles, which replaces `pair_s`; None in profiles without it.
      windows: each distinct window of the layers, None for no window, and the share of layers that have it.
        The times of attention above are those of layers without one.
      experts: reading of a mixture of experts; None in models without.
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
    tiles: TileCosts | None = None
    windows: tuple[tuple[int | None, float], ...] = ((None, 1.0),)
    experts: ExpertCosts | None = None


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Coefficients of the serving thread's time for a step; all but the last two apply before its launch.

    Attributes:
      step_s: time per step: scheduler, plan, giving ids to turns.
      row_s: time per row of the step.
      turn_s: time per turn since the previous step: its prompt, its answer, its user.
      chunk_s: time per chunk to copy in either direction: gather or scatter, copy, completion.
      launch_s: time to launch the kernels, while the device runs those already launched. The thread does this
        itself, or is free for other work if a thread of jaxlib does it.
      launch_beside_copies_s: the same while chunks are being copied.
    """

    step_s: float
    row_s: float
    turn_s: float
    chunk_s: float
    launch_s: float
    launch_beside_copies_s: float


@dataclass(frozen=True, kw_only=True)
class LinkCosts:
    """Costs of one direction between device and pinned host memory.

    Attributes:
      bytes_per_s: bandwidth for successive chunks.
      latency_s: time from the start of a copy to its first byte on an idle link.
    """

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class StepFigure:
    """Measured step that a profile must reproduce.

    Attributes:
      what: description and origin.
      bucket_tokens: padded query tokens.
      rows: groups of equal rows: (number of rows, query tokens, context tokens at the row's end).
      measured_s: time on the device.
      tolerance: largest difference as a share of `measured_s`.
    """

    what: str
    bucket_tokens: int
    rows: tuple[tuple[int, int, int], ...]
    measured_s: float
    tolerance: float


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """Profile of a model on a device.

    Attributes:
      model, device, dtype: what was profiled; the model has its `random:` preset's name.
      source: "measured", or "derived" from published figures of the hardware.
      provenance: origin of the figures by keyword: versions, commands, papers, reasoning.
      kv_token_bytes: KV cache bytes per token, all layers.
      step: costs of a step on the device.
      to_device, to_host: costs of copies between tiers.
      both_ways_share: share of its bandwidth that a copy keeps while one runs in the other direction.
      page_copy_byte_s: device time per byte gathered from pages or scattered to them.
      hosts: costs of the serving thread by the launching thread (`LAUNCHES`); "jaxlib" is required.
      launches: launching thread in use.
      fetch_s: time from the end of a step on the device until its ids are on the host.
      fitted_runs: names of result documents of served runs that were used for fitting.
      figures: measured steps.
      num_devices: devices that share weights, KV cache and copies; always 1 in files.
      host_share: share of a chunk's bytes that it takes in host memory and in transit; always 1 in files.
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
        """Return the bytes of a chunk in host memory and in transit, over all devices."""
        return round(chunk_tokens * self.kv_token_bytes * self.host_share)

    @property
    def host(self) -> HostCosts:
        """Costs of the serving thread with the launching thread in use."""
        return self.hosts[self.launches]

    def launching(self, thread: str) -> Self:
        """Return a copy whose kernels are launched by `thread`; raises ConfigError if its costs are
        missing."""
        if thread not in self.hosts:
            raise ConfigError("launches", thread, f"one of the profile's hosts: {', '.join(self.hosts)}")
        return dataclasses.replace(self, launches=thread)

    def keeping(self, kv_token_bytes: int, *, rate: float = 1.0) -> Self:
        """Return a copy with another KV cache size per token; steps read `rate` times the bytes/s."""
        kv_read_s = self.step.kv_read_s * kv_token_bytes / self.kv_token_bytes / rate
        tiles = self.step.tiles
        if tiles is not None and kv_token_bytes < self.kv_token_bytes:
            tiles = dataclasses.replace(tiles, in_bytes=True)
        step = dataclasses.replace(self.step, kv_read_s=kv_read_s, tiles=tiles)
        return dataclasses.replace(self, kv_token_bytes=kv_token_bytes, step=step)

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Read a profile from a path, or by the name of one in the package (see `profile_names`).

        Raises:
          ConfigError: the file cannot be read, or a value is invalid.
        """
        path = _DIRECTORY / f"{name}.json" if str(name) in profile_names() else Path(name)
        return cls(**_Reader(str(name), path).profile())


def profile_names() -> list[str]:
    """List the profiles in the package."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.json"))


class _Reader:
    """Reader of one file, which reports what is wrong with it."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path

    def profile(self) -> dict[str, Any]:
        """Return the arguments of a `DeviceProfile`."""
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
        others: dict[str, Any] = {}
        if "tiles" in part:
            others["tiles"] = self._tiles(part)
        if "windows" in part:
            others["windows"] = self._windows(part)
        if "experts" in part:
            others["experts"] = self._experts(part)
        names = [f.name for f in dataclasses.fields(StepCosts) if f.default is dataclasses.MISSING]
        others |= {name: self._number(part, name) for name in names}
        costs = StepCosts(**others)
        if costs.overlap < 1:
            raise self._error("a profile whose step.overlap is at least 1", f"found {costs.overlap}")
        return costs

    def _tiles(self, step: Mapping[str, Any]) -> TileCosts:
        part = self._part(step, "tiles")
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(TileCosts):
            if field.type == "bool":
                fields[field.name] = field.name != _IN_BYTES and self._flag(part, field.name)
            else:
                number = self._number(part, field.name, above=0)
                fields[field.name] = int(number) if field.type == "int" else number
        return TileCosts(**fields)

    def _experts(self, step: Mapping[str, Any]) -> ExpertCosts:
        part = self._part(step, "experts")
        counts: dict[str, Any] = {name: part.get(name) for name in ("num_experts", "num_chosen")}
        if not all(type(count) is int for count in counts.values()) or not (
            1 <= part["num_chosen"] <= part["num_experts"]
        ):
            raise self._error(
                "a profile whose step.experts has integers num_experts, and num_chosen from 1 to num_experts",
                f"found {counts!r:.60}",
            )
        return ExpertCosts(**counts, read_s=self._number(part, "read_s", above=0))

    def _windows(self, step: Mapping[str, Any]) -> tuple[tuple[int | None, float], ...]:
        limit = "a profile whose step.windows are pairs of a window (from 1, or null) and its share, 1 in all"
        found = self._list(step, "windows")
        for pair in found:
            is_pair = isinstance(pair, list) and len(pair) == 2 and type(pair[1]) in (int, float)
            if not is_pair or not (pair[0] is None or (type(pair[0]) is int and pair[0] > 0)):
                raise self._error(limit, f"found {pair!r:.60}")
        shares = [share for _, share in found]
        if not (min(shares, default=0) > 0 and math.isclose(sum(shares), 1)):
            raise self._error(limit, f"found {shares!r:.60}")
        return tuple((window, float(share)) for window, share in found)

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
        """Return a finite number of at least 0, or above `above`."""
        found: Any = values.get(name)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not 0 <= found < math.inf or (above is not None and found <= above):
            limit = "from 0 on" if above is None else f"above {above:g}"
            raise self._error(f"a profile with a finite number {name!r} {limit}", f"found {found!r:.60}")
        return float(found)

    def _flag(self, values: Mapping[str, Any], name: str) -> bool:
        found: Any = values.get(name)
        if not isinstance(found, bool):
            raise self._error(f"a profile with true or false as {name!r}", f"found {found!r:.60}")
        return found

    def _error(self, limit: str, hint: str = "") -> ConfigError:
        return ConfigError(_FIELD, self._name, limit, hint)
