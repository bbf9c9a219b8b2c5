"""Where everything of an exchange lies: the table of addresses that a device has, and its words.

Owns: the layout of both, and how large rows and launches may be. Does not know: kernels, or JAX.

A device's table holds 64-bit numbers: its place among the devices, the address of its own status word, then
the addresses of everybody's inboxes, then of everybody's words. A device's words are a status, padding, for
every program a counter of its launches by inbox and one of its launches by letter, and, for the latter, for
every program and peer a flag of beginnings, one of ends, and a letter: two addresses of 64 bits.
"""

from __future__ import annotations

NUM_PROGRAMS = 128
"""Of a launch by inbox: as many as an NVIDIA data centre GPU runs side by side. The same in every such
launch, so that all programs' counts say alike which inbox's turn it is."""

MAX_PROGRAMS = 256
"""Of a launch by letter, which reads from far away, and so more at a time."""

MAX_DEVICES = 4
MAX_ROW_BYTES = 32768
"""Of partial sums: registers hold a row of every device, and of 16,384 numbers of 32 bits they would not."""

MAX_ROWS = 512
"""That all devices are sent, and that a sum without a norm may have."""

MAX_ROWS_BY_PEER_BUFFER = {2: MAX_ROWS, 3: 2048, 4: 2048}
"""Of a launch in shares that goes through inboxes, all shares together, by the number of devices.

Devices write to each other's memory faster than they read it, and shares by letter are read. But from inboxes
normed rows are copied, of which one of two devices gets half, and they are in the way: 2,048 rows of 8,192
take 162 us in place of 194 among four H100s, and 127 in place of 114 between two. Three are a guess."""

FASTER_WHOLE = {2: MAX_ROWS, 3: 128, 4: 64}
"""Rows up to which sending all of them to all devices is no slower than shares, by the number of devices.

Of shares a device is sent 2 / n of the bytes among n devices, but devices meet twice. Among four H100s 32
rows of 8,192 take 16 us whole and 18 or more in shares, 128 take 33 and 25; three are a guess."""

NUM_PEER_BUFFERS = 2

EMPTY = -1
"""An integer of any size, which no number in an inbox looks like: all bits are ones, a NaN."""

RANK, STATUS, ADDRESSES = range(3)
"""Places in a table; ADDRESSES is the first of the inboxes'."""

PEER_BUFFER_COUNTS = 32
"""Place of the first counter of launches by inbox among a device's words: the status has a line of memory to
itself."""

HANDSHAKE_COUNTS = PEER_BUFFER_COUNTS + NUM_PROGRAMS
"""Of the first counter of launches by letter."""

FLAGS = HANDSHAKE_COUNTS + MAX_PROGRAMS
"""Of the first flag."""

LIMIT = 1 << 24
"""Looks at flags or inboxes before a peer counts as lost, tens of seconds: devices are far closer
together."""


def peer_buffer_rows(num_devices: int) -> int:
    """Rows that a device may leave in an inbox: all of few, or two shares, of partial sums and normed."""
    return max(MAX_ROWS, -(-2 * MAX_ROWS_BY_PEER_BUFFER[num_devices] // num_devices))


def fits_in_peer_buffers(share_bytes: int, capacity: int) -> bool:
    """Whether a share of partial sums and one with norms do, of which each peer may send `capacity` bytes."""
    return 2 * share_bytes <= capacity


def peer_buffers_len(num_devices: int, capacity: int) -> int:
    """Bytes of all inboxes of a device, to each of which every peer may send `capacity`."""
    return NUM_PEER_BUFFERS * (num_devices - 1) * capacity


def table_len(num_devices: int) -> int:
    """64-bit numbers of a device's table."""
    return ADDRESSES + 2 * num_devices


def handshakes_place(num_devices: int) -> int:
    """Place of the first letter among a device's words."""
    return FLAGS + 2 * MAX_PROGRAMS * num_devices


def words_len(num_devices: int) -> int:
    """32-bit words of a device."""
    return handshakes_place(num_devices) + 4 * MAX_PROGRAMS * num_devices


def table_row(rank: int, peer_buffers: list[int], words: list[int]) -> list[int]:
    """A device's table: `inboxes` and `words` are everybody's addresses."""
    return [rank, words[rank], *peer_buffers, *words]
