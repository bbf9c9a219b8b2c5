"""What became of vLLM's tests, and why those that failed did.

Owns: the outcomes, and the order in which causes are looked for.
Does not know: how the tests ran.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from pensieve_lab.vllm_tests.copying import ENTRYPOINTS, Selection

type Outcome = Literal["passed", "skipped", "by design", "refused", "other model", "stand-in", "answer"]

_PARAM: Final = re.compile(r"[\"']param[\"']: ?[\"']([^\"']+)[\"']")
_CODE: Final = re.compile(r"[\"']code[\"']: ?[\"']([^\"']+)[\"']")
_REFUSED: Final = re.compile(r"Error code: 4\d\d")
_STAND_IN: Final = re.compile(r"'_Meta'|Anything")
_CAUSE_LENGTH: Final = 240
_ENTRYPOINTS: Final = f"{ENTRYPOINTS.as_posix()}/"


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test.

    Attributes:
      file, test: where it is, and its name with parameters.
      outcome: "by design" or "other model" for what `selection.toml` lists; "stand-in" if the test uses a
        class of vLLM's; "refused" for an error of the client's; "answer" for everything else.
      cause: the refused field, the names that stand in, or the assertion.
    """

    file: str
    test: str
    outcome: Outcome
    cause: str


def result_of(line: Mapping[str, Any], selection: Selection) -> TestResult:
    """Return what became of the test of one line that the plugin wrote."""
    path, _, test = line["test"].removeprefix(_ENTRYPOINTS).partition("::")
    outcome, cause = _outcome(line, test, selection)
    return TestResult(path, test, outcome, " ".join(cause.split())[:_CAUSE_LENGTH])


def _outcome(line: Mapping[str, Any], test: str, selection: Selection) -> tuple[Outcome, str]:
    if line["outcome"] in ("passed", "skipped"):
        return line["outcome"], ""
    if line["outcome"] == "not collected":
        return "stand-in", line["message"]
    function = test.partition("[")[0].rpartition("::")[2]
    if function in selection.known:
        return cast(tuple[Outcome, str], selection.known[function])
    answered = " ".join([line["message"], *line["errors"]])
    for name, pattern in selection.by_design.items():
        if pattern.search(answered):
            return "by design", name
    if line["used"] or _STAND_IN.search(line["message"]):
        return "stand-in", ", ".join(line["used"]) or line["message"]
    if line["errors"] or _REFUSED.search(line["message"]):
        return "refused", _refusal(line["errors"], line["message"])
    return "answer", line["message"]


def _refusal(errors: Sequence[str], message: str) -> str:
    last = errors[-1] if errors else message
    params, codes = _PARAM.findall(last), _CODE.findall(last)
    return f"{' '.join(codes[:1] + [f'({param})' for param in params[:1]])}: {last} {message}"
