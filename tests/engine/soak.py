"""Many more random scenarios than a test run has time for.

    python -m tests.engine.soak --num_scenarios=100000 --seed=0

Scenario i is `random_scenario(seed + i)`. Prints the range, a summary, and for every failure its seed and its
error; the exit status is 1 if there was one. `--seed=S --num_scenarios=1` runs one again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import traceback
from collections import Counter
from typing import NamedTuple

from tqdm import tqdm

from tests.engine.driver import run_scenario
from tests.engine.scenarios import random_scenario


class Outcome(NamedTuple):
    """What became of one scenario; `error` is its traceback, or None."""

    seed: int
    num_turns: int
    totals: Counter[str]
    error: str | None


def run_seed(seed: int) -> Outcome:
    try:
        driver = run_scenario(random_scenario(seed))
    except Exception:  # whatever it is, it is what the soak looks for
        return Outcome(seed, 0, Counter(), traceback.format_exc())
    return Outcome(seed, driver.num_checked, driver.totals, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num_scenarios", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first scenario")
    parser.add_argument("--num_processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.num_scenarios)
    print(f"scenarios of seeds {seeds.start} to {seeds.stop - 1}")
    num_turns, totals, failed = 0, Counter(), []
    with multiprocessing.get_context("spawn").Pool(args.num_processes) as pool:
        for outcome in tqdm(pool.imap_unordered(run_seed, seeds, chunksize=8), total=len(seeds)):
            num_turns += outcome.num_turns
            totals += outcome.totals
            if outcome.error is not None:
                failed.append(outcome.seed)
                tqdm.write(f"seed {outcome.seed}:\n{outcome.error}")
    print(f"{len(seeds)} scenarios, {num_turns} turns equal, {dict(totals)}, {len(failed)} failed")
    if failed:
        print(f"failed seeds: {sorted(failed)[:20]}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
