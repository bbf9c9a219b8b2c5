"""Schemas of JSONSchemaBench, in a random order, and those of them that compile for a model.

Owns: reading a bare repository of the benchmark, and the reasons for which schemas do not compile.
Does not know: models, replies, or how a reply is judged.
"""

from __future__ import annotations

import collections
import json
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from pensieve_jax import StructuredOutput
from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.text.grammar import Grammars

_DATA: Final = "data"
_NOT_STORED: Final = "file is not in the copy of the repository"
_NUMBERS: Final = re.compile(r"\d[\d,]*")
# Words of the engine's messages, and the name under which a document counts them.
_REASONS: Final = (
    (re.compile(r"oneOf constraints are not supported"), "oneOf whose parts may overlap"),
    (re.compile(r"Unknown format"), "unknown format"),
    (
        re.compile(r"min/maxProperties only supported"),
        "minProperties or maxProperties with optional properties",
    ),
    (re.compile(r"are not disjoint"), "patternProperties that overlap"),
    (re.compile(r"circular references"), "circular reference with siblings"),
    (re.compile(r"look-?around"), "expression with lookaround"),
    (re.compile(r"backreferences"), "expression with backreferences"),
    (re.compile(r"Resource .* is not present|external resources"), "reference to another document"),
    (re.compile(r"Unsatisfiable schema"), "unsatisfiable"),
    (re.compile(r"at most \d+ bytes"), "larger than 64 KiB"),
)
_KEYS: Final = re.compile(r"Unimplemented keys: \[([^\]]*)")


class Bench(NamedTuple):
    """A bare repository of the benchmark.

    Attributes:
      path: its directory.
      names: files of schemas below `data`, such as "Github_easy/o1.json", sorted.
    """

    path: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, path: str) -> Bench:
        """List the files of a bare repository; raises CalledProcessError for another directory."""
        listed = _git(path, "ls-tree", "-r", "--name-only", "-z", "HEAD", _DATA).decode().split("\0")
        names = (str(PurePosixPath(name).relative_to(_DATA)) for name in listed if name.endswith(".json"))
        return cls(path, tuple(sorted(names)))

    @property
    def revision(self) -> str:
        """The commit whose files are read."""
        return _git(self.path, "rev-parse", "HEAD").decode().strip()

    def drawn(self, seed: int) -> Iterator[tuple[str, Any]]:
        """Yield all names in a random order, each file as likely as any other, with their schemas.

        A file that the copy lacks has None as its schema.
        """
        names = list(self.names)
        random.Random(seed).shuffle(names)
        for name in names:
            try:
                text = _git(self.path, "show", f"HEAD:{_DATA}/{name}")
            except subprocess.CalledProcessError:
                yield name, None
                continue
            yield name, json.loads(text)


class Case(NamedTuple):
    """A schema of the benchmark: its file, the schema, and the form of replies."""

    name: str
    schema: Any
    form: StructuredOutput


class Drawn(NamedTuple):
    """Schemas that were drawn for one model.

    Attributes:
      cases: those that compile, in the order of the draw.
      refused: number of those that do not, by reason.
      sets: numbers of schemas drawn and compiled, for each set of the benchmark.
    """

    cases: list[Case]
    refused: dict[str, int]
    sets: dict[str, dict[str, int]]


def compiled_cases(grammars: Grammars, bench: Bench, seed: int, count: int) -> Drawn:
    """Draw schemas until `count` of them compile, or all are drawn."""
    cases: list[Case] = []
    refused: collections.Counter[str] = collections.Counter()
    sets: dict[str, dict[str, int]] = {}
    for name, schema in bench.drawn(seed):
        if len(cases) == count:
            break
        numbers = sets.setdefault(name.split("/")[0], {"drawn": 0, "compiled": 0})
        numbers["drawn"] += 1
        if schema is None:
            refused[_NOT_STORED] += 1
            continue
        try:
            form = StructuredOutput.json_schema(schema)
            grammars.compile(form)
        except InvalidRequestError as error:
            refused[reason_of(error)] += 1
            continue
        cases.append(Case(name, schema, form))
        numbers["compiled"] += 1
    return Drawn(cases, dict(refused.most_common()), dict(sorted(sets.items())))


def reason_of(error: InvalidRequestError) -> str:
    """Return the reason of a refusal without what is special to the schema."""
    message = str(error)
    keys = _KEYS.search(message)
    if keys is not None:
        return "keywords " + ", ".join(sorted(re.findall(r"\w+", keys[1])))
    for pattern, reason in _REASONS:
        if pattern.search(message):
            return reason
    detail = message.rsplit("must be ", 1)[-1].split(" while processing", 1)[0]
    return f"{type(error).__name__}: {_NUMBERS.sub('N', detail)[:80]}"


def _git(path: str, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", path, *arguments], check=True, capture_output=True).stdout
