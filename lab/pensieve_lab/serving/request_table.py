"""Table of a load point's requests, from which its latencies and rates can be recomputed.

Owns: the columns, and their compressed form inside a JSON document.
Does not know: latencies or rates.

The table is stored inside the document and not in a file of its own. Load points are appended, split and
merged between documents, and a second file would get lost.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pensieve_lab.serving.run import Run
from pensieve_lab.workload import Answer, UserTurn

COLUMNS = (
    *("conversation", "turn", "arrival_us", "first_token_us", "end_us"),
    *("history_tokens", "prompt_tokens", "output_tokens"),
    *("reused_gpu_tokens", "swapped_in_tokens", "recomputed_tokens", "prefilled_tokens", "wasted_tokens"),
)
"""Columns, one array each. Every answer of the run has a row, and so has every request that arrived in the
measured window and was not answered. Conversations are numbered in the order of their first rows. Times are
whole microseconds since the start of the run, rounded down, so that a request stays on its side of the
window's edges. An unanswered request has -1 for its last two times, the number of output tokens that it asked
for, and 0 in the columns after that."""
LAGS = ("lag_due_us", "lag_us")
"""Two arrays: when each turn was due, and how much later the client sent it."""
END = "run_end_us"
UNITS = {
    "requests": "compressed .npz in base64, and its SHA-256; see serving/request_table.py",
    "max_client_lag_s": "the point is void if the 99th percentile of client_lag_s is above it; null: never",
}


def request_table(run: Run) -> dict[str, str]:
    """Return the table of a run's requests as fields of a JSON document."""
    numbers: dict[str, int] = {}
    rows = [_answered(answer, numbers) for answer in run.answers]
    rows += [_unanswered(turn, numbers) for turn in run.unfinished]
    table = np.array(rows, np.int64).reshape(len(rows), len(COLUMNS))
    arrays: dict[str, Any] = {name: table[:, number] for number, name in enumerate(COLUMNS)}
    lags = np.array([(_us(lag.due_s), _us(lag.lag_s)) for lag in run.lags], np.int64).reshape(-1, len(LAGS))
    arrays |= {name: lags[:, number] for number, name in enumerate(LAGS)}
    arrays[END] = np.int64(_us(run.end_s))
    return packed(arrays)


def packed(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Return arrays as fields of a JSON document."""
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    content = file.getvalue()
    return {
        "sha256": hashlib.sha256(content).hexdigest(),
        "npz_base64": base64.b64encode(content).decode("ascii"),
    }


def _answered(answer: Answer, numbers: dict[str, int]) -> Sequence[int]:
    turn, usage = answer.turn, answer.usage
    return (
        *(_number(turn, numbers), turn.turn_index, _us(turn.arrival_s)),
        *(_us(answer.first_token_s), _us(answer.end_s)),
        *(turn.num_history_tokens, turn.prompt_tokens, usage.output_tokens),
        *(usage.reused_gpu_tokens, usage.swapped_in_tokens, usage.recomputed_tokens, usage.prefilled_tokens),
        usage.resume_recomputed_tokens,
    )


def _unanswered(turn: UserTurn, numbers: dict[str, int]) -> Sequence[int]:
    return (
        *(_number(turn, numbers), turn.turn_index, _us(turn.arrival_s), -1, -1),
        *(turn.num_history_tokens, turn.prompt_tokens, turn.output_tokens),
        *(0, 0, 0, 0, 0),
    )


def _number(turn: UserTurn, numbers: dict[str, int]) -> int:
    return numbers.setdefault(turn.conversation_id, len(numbers))


def _us(seconds: float) -> int:
    return math.floor(1e6 * seconds)
