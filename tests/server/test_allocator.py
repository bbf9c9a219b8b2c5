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
