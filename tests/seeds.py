"""Where random tests begin, anew in every run and there again on request, and how many there are."""

from __future__ import annotations

import os
import random
from typing import Final

EVERYTHING: Final = os.environ.get("TESTS_ALL") == "1"


def new_seed() -> int:
    """What `TESTS_SEED` says, or drawn; printed, so that it is shown where its test fails."""
    seed = int(os.environ.get("TESTS_SEED") or random.SystemRandom().randrange(2**32))
    print(f"TESTS_SEED={seed}")
    return seed


def enough(num: int, all_of_them: int) -> int:
    """How many a long test has: all with `make test-all`, else what continuous integration has time for."""
    return all_of_them if EVERYTHING else num
