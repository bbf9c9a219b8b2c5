"""Seeds of random tests, new in every run unless set, and the number of their repetitions."""

from __future__ import annotations

import os
import random
from typing import Final

EVERYTHING: Final = os.environ.get("TESTS_ALL") == "1"


def new_seed() -> int:
    """Return `TESTS_SEED`, or a new seed; print it, so that a failure shows it."""
    seed = int(os.environ.get("TESTS_SEED") or random.SystemRandom().randrange(2**32))
    print(f"TESTS_SEED={seed}")
    return seed


def enough(num: int, all_of_them: int) -> int:
    """Return a long test's repetitions: all with `make test-all`, else as many as CI has time for."""
    return all_of_them if EVERYTHING else num
