"""The tables of `pensieve generate` about the histories of its turns."""

from __future__ import annotations

import re
from types import SimpleNamespace

from pensieve_jax import Usage
from pensieve_jax.commands.usage_tables import summary

COUNTERS = (
    "num_compilations",
    "swapped_out_bytes",
    "swapped_in_bytes",
    "num_dropped_chunks",
    "transfer_stall_s",
)
NONE = dict.fromkeys(COUNTERS, 0)


def rows(outputs, num_done, **after):
    """Return the values of both tables, by column name."""
    text = summary(outputs, num_done, 2.0, NONE, NONE | after)
    found = {}
    for table in text.split("\n\n"):
        columns, _, row = (re.split(r"\s{2,}", line.strip()) for line in table.splitlines())
        found |= dict(zip(columns, row, strict=True))
    return found


def test_the_share_of_reused_histories():
    usage = Usage(
        prompt_tokens=30,
        reused_gpu_tokens=120,
        swapped_in_tokens=60,
        recomputed_tokens=20,
        prefilled_tokens=31,
        output_tokens=69,
        num_suspensions=0,
    )
    found = rows([SimpleNamespace(usage=usage)] * 2, 3, swapped_out_bytes=5_000_000)
    assert (found["turns"], found["not run again"]) == ("2", "3")
    assert found["history tokens"] == "400"
    assert [found[name] for name in ("found on device", "on host", "recomputed")] == ["60%", "30%", "10%"]
    assert (found["new tokens"], found["output tokens"], found["output tokens/s"]) == ("62", "138", "69")
    assert found["MB to host"] == "5.000"


def test_no_history_has_no_share():
    found = rows([], 3)
    assert (found["turns"], found["not run again"], found["found on device"]) == ("0", "3", "-")
