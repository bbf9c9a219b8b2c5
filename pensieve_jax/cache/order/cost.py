"""What it costs to recompute a chunk, by how much context it attends to (the paper's section 4.3.1).

Owns: `Cost(l)`, in seconds, non-decreasing in the context length `l`: a chunk's dense layers cost the
same wherever it stands, its attention grows with what comes before it. That is why leading chunks are
the cheap ones. The built-in model is analytic; a measured one comes from a profile, a JSON file.
Does not know: how a profile is measured (`pensieve profile`, `device.start_costs`), or what the
engine runs on: `assembly` says what a profile must have been measured with.
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
    "alone": "a step that recomputes this chunk and nothing else, as the paper profiles it; mostly the "
    "reading of all weights, which in a batch is paid once for everybody",
    "in_batch": "a share of a step that recomputes one chunk of each of many sequences: what one chunk more "
    "costs an engine whose batches hold recomputed chunks, prompts and replies together",
}
"""What `Cost(l)` may stand for, and why one would choose it."""

DEFAULT_COST_KIND = "in_batch"

_FORMAT = "pensieve cost profile, version 1"
_FIELD = "cache.cost_profile"
_MEASURE = "measure this model here with `pensieve profile`"
_UNITS = {
    "*_s": "seconds for one chunk of chunk_tokens tokens, over all layers",
    "context_len": "tokens up to the chunk's end, its own included",
    "attention_s": "the attention operation by itself; of a profile measured at a start, how much longer the "
    "step takes than at the shortest context",
    "rest_s": "everything else of the step: total - attention at the shortest context",
    "total_s": "the whole step, as measured",
}
_MAX_COST_S = 1e6  # no chunk takes days


class CostModel(Protocol):
    """Seconds to recompute one chunk."""

    def chunk_cost_s(self, context_len: int) -> float:
        """Cost of a chunk that ends at position `context_len`; never decreases with it."""
        ...


@dataclass(frozen=True)
class AnalyticCostModel:
    """Floating-point operations over a device's rate: what there is before anything was measured.

    Attributes:
      chunk_tokens: tokens of a chunk.
      num_weights: parameters of the layers, each a multiply-add a token.
      attention_width: num_layers * num_heads * head_dim; a token does two multiply-adds of this width
        (scores and values) for every token it attends to.
      flop_per_s: the device's rate. It scales every cost alike, so the order of eviction ignores it.
    """

    chunk_tokens: int
    num_weights: float
    attention_width: float
    flop_per_s: float = 4e14

    def chunk_cost_s(self, context_len: int) -> float:
        """Dense operations plus attention over `context_len` tokens, in seconds."""
        flop = 2 * self.num_weights + 4 * self.attention_width * context_len
        return self.chunk_tokens * flop / self.flop_per_s


@dataclass(frozen=True, kw_only=True)
class CostSubject:
    """What costs were measured of. Weights do not matter: fine-tunings of one model cost the same.

    Attributes:
      architecture, num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size,
        vocab_size: the model's.
      dtype: of weights.
      kv_dtype: of KV state; the same unless it is stored in 8 bits.
      device: its kind, as the runtime calls it.
      tensor_parallel_size: devices that share each layer.
      chunk_tokens: tokens of a chunk.
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


class CostPoint(NamedTuple):
    """Seconds for one chunk that ends at `context_len`; see `_UNITS`."""

    context_len: int
    attention_s: float
    rest_s: float
    total_s: float


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """A measurement, as it is kept in a file.

    Attributes:
      subject: what it was measured of.
      model: the model's name, for people.
      jax_version, command: how it was measured.
      num_batched_chunks: chunks of the steps that "in_batch" is a share of.
      cost: the kind that `Cost(l)` is: a key of `curves`.
      curves: by kind (see `COST_KINDS`), at least two points of ascending context length.
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
        """Those that `Cost(l)` is made of."""
        return self.curves[self.cost]

    def to_json(self) -> dict[str, Any]:
        """Plain values, with their units and the reason for the choice of cost."""
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
        """Write the file anew; raises OSError."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, subject: CostSubject | None = None) -> Self:
        """Read a file that `save` wrote, of `subject` unless that is None.

        Raises:
          ConfigError: it cannot be read, is no profile, holds values that no measurement gives, or was
            measured of something else than `subject`.
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
    """Costs between measured points by straight lines, and beyond the last by the last line's slope.

    A point that was measured below one of a shorter context counts as much as that one, so that noise
    never makes a later chunk cheaper. Before the first point the cost is the first point's.
    """

    def __init__(self, points: Sequence[CostPoint]) -> None:
        """At least two points of ascending `context_len`; their `total_s` is what counts."""
        assert len(points) >= 2
        self._lens = [point.context_len for point in points]
        self._costs_s = list(itertools.accumulate((point.total_s for point in points), max))

    @classmethod
    def load(cls, path: str | Path, subject: CostSubject) -> Self:
        """The model of a profile's file; raises ConfigError as `CostProfile.load`."""
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
        return min(costs_s[left] + share * rise_s, costs_s[right])  # rounding stays below the next line


class _Reader:
    """One file, and what is wrong with it."""

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def profile(self) -> dict[str, Any]:
        """Arguments of a `CostProfile`."""
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
        subject = {"kv_dtype": subject.get("dtype"), **subject}  # older files are of one dtype
        kinds = {"int": int, "str": str}  # annotations are strings here
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
            found = f"found {value!r:.60}" if name in values else "there is none"
            kind_name = getattr(kind, "__name__", str(kind))
            raise self._error(f"a profile with {kind_name} {name!r}", f"{found}: {_MEASURE}")
        return value

    def _error(self, limit: str, hint: str) -> ConfigError:
        return ConfigError(_FIELD, str(self._path), limit, hint)
