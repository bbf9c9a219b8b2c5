"""The cost of recomputing a chunk, as a function of its context length (the paper's section 4.3.1).

Owns: `Cost(l)`, in seconds, non-decreasing in the context length `l`. A chunk's dense layers cost the same at
every position, and its attention grows with the tokens before it, up to a layer's window, so leading chunks
are the cheapest. The built-in model is analytic; a measured model comes from a profile, a JSON file.
Does not know: how a profile is measured (`pensieve profile`, `device.start_costs`), or the engine's hardware:
`assembly` states what a profile must have been measured on.
Called by the eviction policies, the policy selector, `assembly` and `pensieve profile`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from pensieve_jax.core.errors import ConfigError

COST_KINDS = {
    "alone": "a step that recomputes only this chunk, as the paper profiles it; mostly the time to read all "
    "weights, which a batch pays once for all of its sequences",
    "in_batch": "a share of a step that recomputes one chunk of each of many sequences: the marginal cost of "
    "a chunk in an engine whose batches mix recomputed chunks, prompts and replies",
}
"""The definitions of `Cost(l)` to choose from, with the reason for each."""

DEFAULT_COST_KIND = "in_batch"

_FORMAT = "pensieve cost profile, version 1"
_FIELD = "cache.cost_profile"
_MEASURE = "measure this model here with `pensieve profile`"
_UNITS = {
    "*_s": "seconds for one chunk of chunk_tokens tokens, over all layers",
    "context_len": "tokens up to the chunk's end, including its own",
    "attention_s": "the attention operation alone; in a profile measured at engine start, the time by which "
    "the step exceeds the step at the shortest context",
    "rest_s": "the rest of the step: total - attention at the shortest context",
    "total_s": "the whole step, as measured",
}
_MAX_COST_S = 1e6  # 11 days: above every plausible measurement


class CostModel(Protocol):
    """Seconds to recompute one chunk."""

    def chunk_cost_s(self, context_len: int) -> float:
        """Return the cost of a chunk that ends at position `context_len`, non-decreasing in it."""
        ...


@dataclass(frozen=True)
class AnalyticCostModel:
    """Floating-point operations over a device's rate, used without a measurement.

    Attributes:
      chunk_tokens: tokens per chunk.
      num_weights: parameters of the layers; each is one multiply-add per token.
      attention_width: num_layers * num_heads * head_dim; a token does two multiply-adds of this width
        (scores and values) for every token it attends to. Layers with a window do not count.
      flop_per_s: the device's rate. It scales all costs equally, so it does not affect the eviction order.
      windows: a window and the attention width of its layers, for each distinct window.
    """

    chunk_tokens: int
    num_weights: float
    attention_width: float
    flop_per_s: float = 4e14
    windows: tuple[tuple[int, float], ...] = ()

    def chunk_cost_s(self, context_len: int) -> float:
        """Return the time of the dense operations plus attention over `context_len` tokens."""
        flop = 2 * self.num_weights + 4 * self.attention_width * context_len
        for window, width in self.windows:
            flop += 4 * width * min(context_len, window)
        return self.chunk_tokens * flop / self.flop_per_s


@dataclass(frozen=True, kw_only=True)
class CostSubject:
    """The model and hardware of a cost measurement.

    It excludes the values of the weights, because all fine-tunings of a model cost the same.

    Attributes:
      architecture, num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size,
        vocab_size: dimensions of the model.
      dtype: type of the computation, and of weights that are not in 8 bits.
      kv_dtype: type of the KV cache; differs from `dtype` only for an 8-bit KV cache.
      device: device kind, as the runtime names it.
      tensor_parallel_size: devices that share each layer.
      chunk_tokens: tokens per chunk.
      layers: what layers cost beside their dimensions: "full" for plain ones, "window 4096", "full moe 8 of
        128 x 768" with experts, or numbers of each, such as "20 full, 8 window 4096".
      weights_dtype: format in 8 bits in which layers keep their weights; None is `dtype`.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    dtype: str
    kv_dtype: str
    device: str
    tensor_parallel_size: int
    chunk_tokens: int
    layers: str = "full"
    weights_dtype: str | None = None


class CostPoint(NamedTuple):
    """Seconds for one chunk that ends at `context_len`; see `_UNITS`."""

    context_len: int
    attention_s: float
    rest_s: float
    total_s: float


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """A measurement of recomputation costs, as stored in a file.

    Attributes:
      subject: the model and hardware that were measured.
      model: display name of the model.
      jax_version, command: how it was measured.
      num_batched_chunks: chunks per step in the measurement of the kind "in_batch".
      cost: the kind of cost that `Cost(l)` uses: a key of `curves`.
      curves: for each kind (see `COST_KINDS`), at least two points of ascending context length.
    """

    subject: CostSubject
    model: str
    jax_version: str
    command: str
    num_batched_chunks: int
    cost: str
    curves: Mapping[str, tuple[CostPoint, ...]]

    @property
    def points(self) -> tuple[CostPoint, ...]:
        """Points of the curve that `Cost(l)` uses."""
        return self.curves[self.cost]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, including units and the definition of the cost."""
        return {
            "format": _FORMAT,
            "model": self.model,
            "subject": dataclasses.asdict(self.subject),
            "jax_version": self.jax_version,
            "command": self.command,
            "units": _UNITS,
            "num_batched_chunks": self.num_batched_chunks,
            "cost": self.cost,
            "cost_is": COST_KINDS[self.cost],
            "curves": {kind: [point._asdict() for point in points] for kind, points in self.curves.items()},
        }

    def save(self, path: str | Path) -> None:
        """Write the profile to a file, replacing it; raises OSError."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, subject: CostSubject | None = None) -> Self:
        """Read a file that `save` wrote; if `subject` is given, the file's subject must equal it.

        Raises:
          ConfigError: the file cannot be read, is not a cost profile, has impossible values, or was measured
            for another subject.
        """
        profile = cls(**_Reader(path).profile())
        expected, found = dataclasses.asdict(subject or profile.subject), dataclasses.asdict(profile.subject)
        differing = [name for name in expected if expected[name] != found[name]]
        if differing:
            wanted = ", ".join(f"{name}={expected[name]!r}" for name in differing)
            got = ", ".join(f"{name}={found[name]!r}" for name in differing)
            raise ConfigError(
                _FIELD, str(path), f"a profile of {wanted}", f"this one is of {got}: {_MEASURE}"
            )
        return profile


class MeasuredCostModel:
    """Linear interpolation between measured points; beyond the last point, the last slope continues.

    A point below the point of a shorter context is raised to it, so that noise never makes a later chunk
    cheaper. Before the first point, the cost is that of the first point.
    """

    def __init__(self, points: Sequence[CostPoint]) -> None:
        """Use the `total_s` of at least two points of ascending `context_len`."""
        assert len(points) >= 2
        self._lens = [point.context_len for point in points]
        self._costs_s = list(itertools.accumulate((point.total_s for point in points), max))

    @classmethod
    def load(cls, path: str | Path, subject: CostSubject) -> Self:
        """Make a model from a profile's file; raises ConfigError as `CostProfile.load` does."""
        return cls(CostProfile.load(path, subject).points)

    def chunk_cost_s(self, context_len: int) -> float:
        lens, costs_s = self._lens, self._costs_s
        if context_len <= lens[0]:
            return costs_s[0]
        right = min(bisect_left(lens, context_len), len(lens) - 1)
        left = right - 1
        share = (context_len - lens[left]) / (lens[right] - lens[left])
        rise_s = costs_s[right] - costs_s[left]
        if share > 1:
            return costs_s[right] + (share - 1) * rise_s
        return min(costs_s[left] + share * rise_s, costs_s[right])  # so that rounding keeps it monotonic


class _Reader:
    """The parser of one profile file, with its error messages."""

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def profile(self) -> dict[str, Any]:
        """Return the arguments of a `CostProfile`; raises ConfigError."""
        try:
            values = json.loads(Path(self._path).read_text(encoding="utf-8"))
        except OSError as error:
            raise self._error("a file that can be read", error.strerror or str(error)) from error
        except (ValueError, RecursionError) as error:
            raise self._error("a cost profile", f"this file is not JSON ({error}): {_MEASURE}") from error
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            found = values.get("format") if isinstance(values, dict) else type(values).__name__
            raise self._error(f"a file of format {_FORMAT!r}", f"found {found!r:.60}: {_MEASURE}")
        subject = self._get(values, "subject", dict)
        # Older files lack kv_dtype, which was dtype, layers, which were plain, and weights_dtype.
        subject = {"kv_dtype": subject.get("dtype"), "layers": "full", **subject}
        kinds = {"int": int, "str": str, "str | None": str | None}  # annotations are strings here
        fields = {
            f.name: self._get(subject, f.name, kinds[str(f.type)]) for f in dataclasses.fields(CostSubject)
        }
        curves = self._get(values, "curves", dict)
        cost = self._get(values, "cost", str)
        if cost not in curves:
            raise self._error(
                f"a profile whose cost is one of its curves {sorted(curves)}", f"found {cost!r:.60}"
            )
        return {
            "subject": CostSubject(**fields),
            "model": self._get(values, "model", str),
            "jax_version": self._get(values, "jax_version", str),
            "command": self._get(values, "command", str),
            "num_batched_chunks": self._get(values, "num_batched_chunks", int),
            "cost": cost,
            "curves": {kind: self._points(kind, curves) for kind in curves},
        }

    def _points(self, kind: str, curves: dict[str, Any]) -> tuple[CostPoint, ...]:
        if kind not in COST_KINDS:
            raise self._error(f"a profile with curves among {list(COST_KINDS)}", f"found {kind!r:.60}")
        entries = self._get(curves, kind, list)
        if len(entries) < 2:
            raise self._error("a profile of at least 2 points", f"{kind!r} has {len(entries)}")
        points: list[CostPoint] = []
        for entry in entries:
            values = entry if isinstance(entry, dict) else {}
            length = self._get(values, "context_len", int)
            if length <= (points[-1].context_len if points else 0):
                raise self._error("a profile of ascending context_len from 1", f"{kind!r} has {length}")
            seconds = [self._get(values, name, int | float) for name in CostPoint._fields[1:]]
            if not all(0 <= s < _MAX_COST_S for s in seconds) or not seconds[-1]:
                limit = f"a profile of seconds from 0 to {_MAX_COST_S:g}, total_s above 0"
                raise self._error(limit, f"{kind!r} has {seconds} at context_len={length}")
            points.append(CostPoint(length, *map(float, seconds)))
        return tuple(points)

    def _get(self, values: dict[str, Any], name: str, kind: Any) -> Any:
        value = values.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            found = f"found {value!r:.60}" if name in values else "it is missing"
            kind_name = getattr(kind, "__name__", str(kind))
            raise self._error(f"a profile with {kind_name} {name!r}", f"{found}: {_MEASURE}")
        return value

    def _error(self, limit: str, hint: str) -> ConfigError:
        return ConfigError(_FIELD, str(self._path), limit, hint)
