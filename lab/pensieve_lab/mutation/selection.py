"""The tests that a mutant is run against, and their order.

Owns: the order and the budget.
Does not know: how tests are run.
Called by `mutation.trial`.

The tests of the mirrored file come first, then those of its folder, then others; within each, files that
spend little time on the mutant. The budget is in processor time as recorded, so the choice does not depend on
the machine's load.

A statement of a module runs when its module is imported, which is before any test. If no test executes a
function of that module, the statement gets the tests of the closest folder that has some.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import PurePath
from typing import NamedTuple

from pensieve_lab.mutation.coverage_map import CoverageMap, CoveringTest, Place
from pensieve_lab.mutation.rooms import mirrored_folder


class Selection(NamedTuple):
    """Tests to run, in groups of one process each, and how many did not fit the budget."""

    groups: list[list[CoveringTest]]
    num_left: int


def select(coverage: CoverageMap, place: Place, budget_s: float, killer: str = "") -> Selection:
    """Return the tests of a mutant of a statement; the test that caught this mutant before comes first."""
    folder = mirrored_folder(place.file)
    tests = dict.fromkeys(coverage.covering(place))
    if not coverage.knows(place) or (place.is_imported and not tests):
        tests |= dict.fromkeys(_closest_tests(coverage, folder))
    ranks = {f"{folder}/test_{PurePath(place.file).stem}.py": 0}
    file_s: defaultdict[str, float] = defaultdict(float)
    for test in tests:
        file_s[test.file] += test.seconds

    def rank(test: CoveringTest) -> int:
        return ranks.get(test.file, 1 if PurePath(test.file).is_relative_to(folder) else 2)

    def group_of(test: CoveringTest) -> tuple[bool, bool]:
        return test.test != killer, rank(test) == 2

    def order(test: CoveringTest) -> tuple[bool, int, float, str, float]:
        return test.test != killer, rank(test), file_s[test.file], test.file, test.seconds

    chosen: list[CoveringTest] = []
    left_s = budget_s
    for test in sorted(tests, key=order):
        if test.seconds <= left_s or not chosen:
            chosen.append(test)
            left_s -= test.seconds
    groups = [list(group) for _, group in itertools.groupby(chosen, key=group_of)]
    return Selection(groups, len(tests) - len(chosen))


def _closest_tests(coverage: CoverageMap, folder: str) -> list[CoveringTest]:
    """Return the tests below a folder, or below its closest ancestor with tests."""
    for path in (folder, *map(str, PurePath(folder).parents)):
        if tests := list(coverage.tests_below(path)):
            return tests
    return []
