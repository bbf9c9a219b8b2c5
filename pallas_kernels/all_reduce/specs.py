"""Where everything of an exchange lies: the table of addresses that a device has, and its words.

Owns: the layout of both, and how large rows and launches may be. Does not know: kernels, or JAX.
Called by: `memory`, `api` and the kernel.

A device's table holds 64-bit numbers: its place among the devices, the addresses of its own status word and
counters, then of everybody's inboxes, then of everybody's words. A device's words are a status, padding, for
every program and peer a flag of beginnings and then one of ends, for every program a counter, and for every
program and peer a letter: two addresses of 64 bits.
"""

from __future__ import annotations

NUM_PROGRAMS = 128
"""Of a launch for few rows: as many as an NVIDIA data centre GPU runs side by side. The same in every such
launch, so that a row is always one program's, whose count says which inbox it is in."""

NUM_PROGRAMS_MANY = 256
"""Of a launch for many rows at most, which reads from far away, and so more at a time."""

MAX_PROGRAMS = NUM_PROGRAMS_MANY
"""Of any launch, which there are flags, counters and letters for."""

MAX_DEVICES = 4
MAX_WIDTH = 16384
MAX_ROWS = 512
"""That inboxes hold, and all devices are sent."""

FASTER_WHOLE = {2: MAX_ROWS, 3: 128, 4: 64}
"""Rows up to which sending all of them to all devices is no slower than shares, by the number of devices.

Of shares a device is sent 2 / n of the bytes among n devices, but devices meet twice. Among four, 32 rows of
8,192 are faster whole and 128 in shares (docs/results/h100x4_parallel_llama2-70b.json); three are a guess."""

NUM_INBOXES = 2

RANK, STATUS, EPOCHS, ADDRESSES = range(4)
"""Places in a table; ADDRESSES is the first of the inboxes'."""

FLAGS = 32
"""Place of the first flag among a device's words: the status has a line of memory to itself."""

LIMIT = 1 << 24
"""Looks at flags before a peer counts as lost, tens of seconds: devices are far closer together."""


def table_len(num_devices: int) -> int:
    """64-bit numbers of a device's table."""
    return ADDRESSES + 2 * num_devices


def epochs_place(num_devices: int) -> int:
    """Place of the first counter among a device's words."""
    return FLAGS + 2 * MAX_PROGRAMS * num_devices


def words_len(num_devices: int) -> int:
    """32-bit words of a device."""
    return epochs_place(num_devices) + MAX_PROGRAMS * (1 + 4 * num_devices)


def table_row(rank: int, inboxes: list[int], words: list[int]) -> list[int]:
    """A device's table: `inboxes` and `words` are everybody's addresses."""
    mine = words[rank]
    return [rank, mine, mine + 4 * epochs_place(len(words)), *inboxes, *words]
