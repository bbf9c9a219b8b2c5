"""Memory of long requests goes back to the system."""

from __future__ import annotations

import subprocess
import sys

# Freeing a block of 30 MiB raises glibc's own threshold, so the next ones come from the heap. They stay there
# below one that is not freed, unless the threshold is set.
_SCRIPT = """
import sys
from pathlib import Path
from pensieve_jax.server.allocator import return_large_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "set":
    assert return_large_blocks()
block = bytearray(30 * 2**20)
del block
blocks = [bytearray(b"x") * (8 * 2**20) for _ in range(8)]
stays = bytearray(b"y") * 2**20
before = resident()
del blocks
print(before - resident())
"""


def freed(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", _SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_freed_blocks_are_returned_to_the_system():
    assert freed("set") >= 60 * 2**20
    assert freed("not") < 60 * 2**20


# Every 64th text stays, so the heap cannot shrink from its end.
_TEXTS = """
import asyncio, sys, time
from pensieve_jax.server.allocator import _num_resident_bytes, return_free_memory, return_large_blocks

async def scenario():
    return_large_blocks()
    trimming = asyncio.ensure_future(return_free_memory(0.0)) if sys.argv[1] == "trim" else None
    await asyncio.sleep(0)
    texts = [b"x" * 2000 + str(number).encode() for number in range(100_000)]
    kept = texts[::64]
    before = _num_resident_bytes()
    del texts
    deadline_s = time.monotonic() + 60.0
    while trimming and before - _num_resident_bytes() < 150e6 and time.monotonic() < deadline_s:
        await asyncio.sleep(0)
    print(before - _num_resident_bytes())

asyncio.run(scenario())
"""


def test_memory_between_texts_that_stay_is_returned_to_the_system():
    for how, is_returned in (("trim", True), ("not", False)):
        done = subprocess.run([sys.executable, "-c", _TEXTS, how], capture_output=True, text=True, check=True)
        assert (int(done.stdout) >= 150e6) == is_returned
