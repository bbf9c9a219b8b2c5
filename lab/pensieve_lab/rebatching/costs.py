"""Launch costs on a device: a few physical coefficients per model, read from a JSON file.

Owns: the coefficients, their meaning, and the time of each launch that they predict.
Does not know: who launches what, or when.

A profile belongs to one model on one device. `source` says whether its coefficients were fitted to
measurements or derived from published figures of the hardware, and `provenance` names the measurements or
figures.
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
from pensieve_jax.rebatching.ring_shapes import RingShape

SOURCES = ("measured", "derived")
FORMAT = "pensieve ring costs, version 1"
_FIELD = "ring_costs"
_TEXTS = ("model", "device", "dtype")
_ABOVE_ZERO = ("copy_bytes_per_s", "token_bytes")
_DIRECTORY = Path(__file__).parent / "profiles"


@dataclass(frozen=True, kw_only=True)
class RingCosts:
    """Cost profile of a model on a device.

    A "column" holds one token's keys and values of all layers in one row of the ring.

    Attributes:
      model, device, dtype: what was profiled; the model has its `random:` preset's name.
      source: "measured", or "derived" from published figures of the hardware.
      provenance: origin of the figures, by keyword.
      token_bytes: KV cache bytes per token.
      weights_s: time to read every weight once, which even the smallest program does.
      column_s: time to read a column.
      step_s: fixed time of a program that computes tokens.
      token_s: time of the dense layers' arithmetic per token, padding included.
      pair_s: time of prompt attention per query-key pair.
      shaped_pair_s: time per pair in a shaped step, whose scores go through memory.
      insert_s, insert_column_s: fixed time of an insertion, and time per column of the ring's row; all
        columns are written.
      take_column_s: time to take a column out of the ring.
      relayout_column_s: time per column of the new ring when its shape changes.
      copy_bytes_per_s: bandwidth of the link between device and host memory.
      host_s: time of the serving thread per program that samples.
      fetch_s: time from the end of a program until its ids are on the host.
    """

    model: str
    device: str
    dtype: str
    source: str
    provenance: Mapping[str, str]
    token_bytes: int
    weights_s: float
    column_s: float
    step_s: float
    token_s: float
    pair_s: float
    shaped_pair_s: float
    insert_s: float
    insert_column_s: float
    take_column_s: float
    relayout_column_s: float
    copy_bytes_per_s: float
    host_s: float
    fetch_s: float

    # Predicted device seconds

    def decode_of(self, shape: RingShape) -> float:
        """Return the time of a step in which every row decodes a token and reads the whole ring."""
        return self._dense_of(shape.batch) + self.column_s * shape.batch * shape.length

    def prefill_of(self, num_rows: int, length: int) -> float:
        """Return the time to prefill prompts of a padded length with causal attention."""
        return self._dense_of(num_rows * length) + self.pair_s * num_rows * length * (length + 1) / 2

    def shaped_of(self, shape: RingShape, length: int) -> float:
        """Return the time of a step in which every row takes `length` tokens, most of them padding."""
        num_tokens = shape.batch * length
        return self._dense_of(num_tokens) + self.shaped_pair_s * num_tokens * shape.length

    def insert_of(self, shape: RingShape) -> float:
        """Return the time to insert a row into the ring."""
        return self.insert_s + self.insert_column_s * shape.length

    def take_of(self, length: int) -> float:
        """Return the time to take a row of `length` columns out of the ring."""
        return self.take_column_s * length

    def resize_of(self, shape: RingShape, *, moves: bool) -> float:
        """Return the time to make a ring of this shape; zeros are written as fast as columns are read."""
        return (self.relayout_column_s if moves else self.column_s) * shape.batch * shape.length

    def copy_of(self, length: int) -> float:
        """Return the time to copy a row to host memory or back; copies run beside programs."""
        return length * self.token_bytes / self.copy_bytes_per_s

    def _dense_of(self, num_tokens: int) -> float:
        """Return the time of everything but attention; reading weights overlaps with arithmetic."""
        return self.step_s + max(self.weights_s, self.token_s * num_tokens)

    # Files

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Read a profile from a path, or by the name of one in the package (see `costs_names`).

        Raises:
          ConfigError: the file cannot be read, or a value is invalid.
        """
        path = _DIRECTORY / f"{name}.json" if str(name) in costs_names() else Path(name)
        return cls(**_checked(str(name), _read(str(name), path)))

    def as_document(self) -> dict[str, Any]:
        """Return the profile as a JSON object that `load` can read."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


NUMBERS = tuple(
    field.name
    for field in dataclasses.fields(RingCosts)
    if field.name not in (*_TEXTS, "source", "provenance")
)
"""Names of the coefficients."""


def costs_names() -> list[str]:
    """List the profiles in the package."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.json"))


def _read(name: str, path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        limit = f"a file that can be read, or one of {', '.join(costs_names())}"
        raise ConfigError(_FIELD, name, limit, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(_FIELD, name, "costs of a ring", f"this file is not JSON ({error})") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ConfigError(_FIELD, name, f"a file of format {FORMAT!r}", f"found {found!r:.60}")
    return values


def _checked(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Validate a document and return the arguments of `RingCosts`."""

    def refuse(limit: str, value: object) -> ConfigError:
        return ConfigError(_FIELD, name, limit, f"found {value!r:.60}")

    for field in _TEXTS:
        if not isinstance(values.get(field), str):
            raise refuse(f"a profile with a text {field!r}", values.get(field))
    if values.get("source") not in SOURCES:
        raise refuse(f"a profile whose source is one of {SOURCES}", values.get("source"))
    provenance = values.get("provenance")
    if not isinstance(provenance, dict) or not all(isinstance(text, str) for text in provenance.values()):
        raise refuse("a profile with texts by keyword as 'provenance'", provenance)
    for field in NUMBERS:
        found: Any = values.get(field)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not 0 <= found < math.inf or (field in _ABOVE_ZERO and not found):
            limit = "above 0" if field in _ABOVE_ZERO else "from 0 on"
            raise refuse(f"a profile with a finite number {field!r} {limit}", found)
    fields = {field: values[field] for field in (*_TEXTS, "source", "provenance", *NUMBERS)}
    return fields | {"token_bytes": int(values["token_bytes"])}
