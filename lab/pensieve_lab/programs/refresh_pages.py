"""Writes tables of pages from the documents in `lab/results`: Paper and we, traces, cells, balance, more.

    python -m pensieve_lab.programs.refresh_pages           # after new documents were written
    # which tables differ, without writing; fails if any does
    python -m pensieve_lab.programs.refresh_pages --check

A table stands between `<!-- table NAME -->` and `<!-- end -->`. The text around it is not changed: read it
again if numbers have changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands.launch import run
from pensieve_lab.pages import (
    balance_tables,
    cells_measured,
    cells_tables,
    paper_eviction,
    paper_tables,
    simulator_tables,
    trace_tables,
)
from pensieve_lab.pages.page import WRITTEN
from pensieve_lab.pages.paper_summary import summary

FLAGS = flags.FLAGS
_DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = tuple(_DOCS / name for name in WRITTEN)
_BLOCK = re.compile(r"<!-- table (\S+) -->\n.*?<!-- end -->", re.DOTALL)

TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "fig10": lambda: paper_tables.throughputs({f"fig10{part}": (f"10{part}",) for part in "abcd"}),
    "kernels": paper_tables.kernels,
    "against-lru": paper_eviction.against_lru,
    "think-times": paper_tables.think_times,
    "long-warm-up": paper_tables.long_warm_up,
    **trace_tables.TABLES,
    **simulator_tables.TABLES,
    **cells_tables.TABLES,
    **balance_tables.TABLES,
    **cells_measured.TABLES,
}


def refreshed(text: str) -> tuple[str, list[str]]:
    """Rewrite the tables of a page; return it and the names of changed tables; raises ConfigError."""
    changed: list[str] = []

    def write(block: re.Match[str]) -> str:
        name = block[1]
        if name not in TABLES:
            raise ConfigError("table", name, f"one of {', '.join(TABLES)}")
        new = f"<!-- table {name} -->\n\n{_made(name)}\n\n<!-- end -->"
        if new != block[0]:
            changed.append(name)
        return new

    return _BLOCK.sub(write, text), changed


def _made(name: str) -> str:
    try:
        return TABLES[name]()
    except FileNotFoundError as missing:
        return f"*No document yet: {Path(missing.filename).name}.*"


def main() -> int:
    any_changed = False
    for page in PAGES:
        new, changed = refreshed(page.read_text(encoding="utf-8"))
        print(f"{page.name}: {', '.join(changed) or 'no table'} differed from the documents")
        any_changed = any_changed or bool(changed)
        if not FLAGS.check:
            page.write_text(new, encoding="utf-8")
    return 1 if FLAGS.check and any_changed else 0


def define_flags() -> None:
    flags.DEFINE_bool("check", False, "Write nothing, and fail if a table differs from the documents.")


if __name__ == "__main__":
    define_flags()
    run(main)
