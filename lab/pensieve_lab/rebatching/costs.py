"""What launches cost on a device: a few physical coefficients of a model, from a JSON file.

Owns: the coefficients, what they mean, and how they make up the time of each launch.
Does not know: who launches what, or when.

A profile is of one model on one device. `source` says whether its coefficients were fitted to measurements or
derived from published figures of the hardware, and `provenance` from which.
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
    """A model on a device; a "column" is one of one row, keys and values of all layers.

    Attributes:
      model, device, dtype: what it is a profile of; the model as `random:` presets name it.
      source: "measured", or "derived" from published figures of the hardware.
      provenance: where the figures come from, by keyword.
      token_bytes: KV state of one token.
      weights_s: reading every weight once, which the smallest program does as well.
      column_s: reading a column.
      step_s: everything else of a program that computes tokens, whatever its size.
      token_s: arithmetic of the dense layers for one token, padding included.
      pair_s: attention of a prompt, for a token that attends to one key.
      shaped_pair_s: the same in a shaped step, whose scores go through memory.
      insert_s, insert_column_s: an insertion, and what it takes for each column of the ring's row, all of
        which are written.
      take_column_s: taking a column out of the ring.
      relayout_column_s: a column of the ring behind a change of its shape.
      copy_bytes_per_s: of the link between device and host memory.
      host_s: of the serving thread, for each program that samples.
      fetch_s: from the end of a program to its ids on the host.
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

    # Seconds on the device

    def decode_of(self, shape: RingShape) -> float:
        """A step in which every row takes a token and reads the whole ring."""
        return self._dense_of(shape.batch) + self.column_s * shape.batch * shape.length

    def prefill_of(self, num_rows: int, length: int) -> float:
        """Prompts of a padded length; each token attends to those before it."""
        return self._dense_of(num_rows * length) + self.pair_s * num_rows * length * (length + 1) / 2

    def shaped_of(self, shape: RingShape, length: int) -> float:
        """A step in which every row takes so many tokens, most of them padding."""
        num_tokens = shape.batch * length
        return self._dense_of(num_tokens) + self.shaped_pair_s * num_tokens * shape.length

    def insert_of(self, shape: RingShape) -> float:
        """A row put into the ring."""
        return self.insert_s + self.insert_column_s * shape.length

    def take_of(self, length: int) -> float:
        """A row taken out of it."""
        return self.take_column_s * length

    def resize_of(self, shape: RingShape, *, moves: bool) -> float:
        """A ring of this shape: what was in it is moved, or zeros are written, as fast as read."""
        return (self.relayout_column_s if moves else self.column_s) * shape.batch * shape.length

    def copy_of(self, length: int) -> float:
        """A row to host memory or back, beside programs."""
        return length * self.token_bytes / self.copy_bytes_per_s

    def _dense_of(self, num_tokens: int) -> float:
        """All but attention: reading weights and arithmetic overlap."""
        return self.step_s + max(self.weights_s, self.token_s * num_tokens)

    # Files

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Read a profile: a path, or the name of one that comes with the package (see `costs_names`).

        Raises:
          ConfigError: it cannot be read, or says what no device does.
        """
        path = _DIRECTORY / f"{name}.json" if str(name) in costs_names() else Path(name)
        return cls(**_checked(str(name), _read(str(name), path)))

    def as_document(self) -> dict[str, Any]:
        """What `load` reads, as JSON's types."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


NUMBERS = tuple(
    field.name
    for field in dataclasses.fields(RingCosts)
    if field.name not in (*_TEXTS, "source", "provenance")
)
"""The coefficients."""


def costs_names() -> list[str]:
    """Profiles that come with the package."""
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
    """Arguments of `RingCosts`."""

    def refuse(limit: str, found: object) -> ConfigError:
        return ConfigError(_FIELD, name, limit, f"found {found!r:.60}")

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
