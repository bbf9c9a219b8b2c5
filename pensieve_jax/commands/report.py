"""Output of benchmarks: tables for users, and one JSON line at the end for programs.

Owns: the format of both, and the destination of the line (`--json`). `provenance` adds the origin.
Does not know: the measurement, or its quality.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands.launch import check_can_write, check_first
from pensieve_jax.commands.provenance import provenance, source_state

flags.disclaim_key_flags()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows as aligned columns: text to the left, numbers to the right."""
    values = [list(row) for row in rows]
    cells = [[_cell(value) for value in row] for row in values]
    is_number = [
        bool(values) and all(isinstance(row[i], int | float) for row in values) for i in range(len(columns))
    ]
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]

    def line(values: Sequence[str]) -> str:
        pairs = zip(values, widths, is_number, strict=True)
        return "  ".join(v.rjust(w) if right else v.ljust(w) for v, w, right in pairs).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, cells)])


def json_line(benchmark: str, results: Mapping[str, Any], *, units: Mapping[str, str], device: str) -> str:
    """Return a self-contained line of JSON: results, units, and provenance."""
    document = {"benchmark": benchmark, "results": results, "units": units, **provenance(device)}
    return json.dumps(document)


def define_document_flag() -> None:
    """Define `--json` for launchers that end with `print_document`, and read the source state before `main`.

    So a wrong `REVISION_VARIABLE` fails before the work, and the document names the tree that began to run.
    """
    flags.DEFINE_flag(_DocumentFlag())
    check_first(source_state)


def print_document(line: str) -> None:
    """Print the document as the last line of a launcher; on a terminal, print how to get it instead.

    `--json` always prints it, `--nojson` never does, and `--json=FILE` also writes it to a file.

    Raises:
      ConfigError: the file cannot be written. The document is printed first.
    """
    asked = flags.FLAGS.json
    is_terminal = sys.stdout.isatty()
    if asked is True or (asked is not False and not is_terminal):
        print(line)
    elif asked is None:
        print("(--json prints all of it as one JSON document, --json=FILE writes it to a file)")
    if isinstance(asked, Path):
        try:
            asked.write_text(f"{line}\n", encoding="utf-8")
        except OSError as error:
            if is_terminal:
                print(line)
            limit = "a file that can be written"
            raise ConfigError("--json", str(asked), limit, error.strerror or str(error)) from error


class _DocumentParser(flags.ArgumentParser):
    """Parser of True, False, or the path of a file."""

    def parse(self, argument: str) -> bool | Path:
        """Parse `--json`, `--nojson` or `--json=FILE`; raise ConfigError for an invalid file."""
        if argument in ("true", "false"):
            return argument == "true"
        path = Path(argument)
        check_can_write("--json", path)
        return path


class _DocumentFlag(flags.Flag):
    """Flag with an optional value. Without one it works as absl's boolean flags do."""

    def __init__(self) -> None:
        super().__init__(
            parser=_DocumentParser(),
            serializer=None,
            name="json",
            default=None,
            help_string="Print one JSON document at the end; --json=FILE writes it to a file. "
            "Default: only if the output is not a terminal.",
            boolean=True,
        )


def device_name() -> str:
    """Return the platform and kind of the first device, for `json_line`."""
    import jax  # here, since commands that print a table check their flags without it

    device = jax.devices()[0]
    return f"{device.platform}: {device.device_kind}"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) >= 0.01 or not value else f"{value:.2g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
