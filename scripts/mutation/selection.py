"""The tests that a mutant is run against, and their order.

Owns: the order and the budget.
Does not know: how tests are run.
Called by: `trial`.

The tests of the mirrored file come first, then those of its folder, then others; among them, files that
spend little time on the mutant. The budget is in seconds of the map, so that the choice does not depend on
the machine's load.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import PurePath
from typing import NamedTuple

from mutation.coverage_map import CoverageMap, CoveringTest, Place
from mutation.drawing import PACKAGE

_TEST_FOLDERS = {"model_defs": "models", "pallas_kernels": "kernels"}


class Selection(NamedTuple):
    """Tests to run: those nearby, others, and how many did not fit the budget."""

    nearby: list[CoveringTest]
    others: list[CoveringTest]
    num_left: int


def mirrored_folder(file: str) -> str:
    """Return the folder of a source file's own tests."""
    package, *folders = PurePath(file).parts[:-1]
    if package != PACKAGE:
        folders = [_TEST_FOLDERS.get(package, package), *folders]
    return "/".join(("tests", *folders))


def select(coverage: CoverageMap, place: Place, budget_s: float, killer: str = "") -> Selection:
    """Return the tests that execute a statement, the one that caught this mutant before first."""
    folder = mirrored_folder(place.file)
    tests = dict.fromkeys(coverage.covering(place))
    if not coverage.knows(place):
        tests |= dict.fromkeys(coverage.tests_below(folder))
    ranks = {f"{folder}/test_{PurePath(place.file).stem}.py": 0}
    file_s: defaultdict[str, float] = defaultdict(float)
    for test in tests:
        file_s[test.file] += test.seconds

    def rank(test: CoveringTest) -> int:
        return ranks.get(test.file, 1 if PurePath(test.file).is_relative_to(folder) else 2)

    def order(test: CoveringTest) -> tuple[bool, int, float, str, float]:
        return test.test != killer, rank(test), file_s[test.file], test.file, test.seconds

    chosen: list[CoveringTest] = []
    left_s = budget_s
    for test in sorted(tests, key=order):
        if test.seconds <= left_s or not chosen:
            chosen.append(test)
            left_s -= test.seconds
    nearby = [test for test in chosen if rank(test) < 2 or test.test == killer]
    others = [test for test in chosen if rank(test) == 2 and test.test != killer]
    return Selection(nearby, others, len(tests) - len(chosen))
