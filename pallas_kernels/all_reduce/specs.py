"""Layout of the exchange memory: each device's table of addresses, and its words.

Owns: the layout of both, and the limits of rows and launches. Does not know: kernels, or JAX.

A device's table holds 64-bit numbers: the device's rank, the address of its own status word, the addresses of
all devices' peer buffers, and the addresses of all devices' words.

A device's words are 32-bit: a status, padding, a counter of peer-buffer launches for every program, and a
counter of handshake launches for every program. For handshakes there are also, for every program and peer, a
start flag, an end flag and the handshake itself: two 64-bit addresses.
"""

from __future__ import annotations

NUM_PROGRAMS = 128
"""Programs of a peer-buffer launch: as many as an NVIDIA data centre GPU runs concurrently. Every such launch
has the same number, so that the counters of all programs select the same buffer."""

MAX_PROGRAMS = 256
"""Most programs of a handshake launch: more than of the others, to hide the latency of remote reads."""

MAX_DEVICES = 4
MAX_ROW_BYTES = 32768
"""Most bytes of a row of partial sums. Registers hold one row of every device, which 16,384 numbers of 32
bits would exceed."""

MAX_ROWS = 512
"""Most rows that are sent to all devices, and most rows of a sum without a norm."""

MAX_ROWS_BY_PEER_BUFFER = {2: MAX_ROWS, 3: 2048, 4: 2048}
"""Most rows, over all shares, of a launch in shares through peer buffers, by the number of devices.

GPUs write to peer memory faster than they read it, and the handshake kernel reads its shares. But normed rows
must be copied out of peer buffers; with two devices these are half of all rows, and the copy costs more than
it saves. 2,048 rows of 8,192 take 162 us instead of 194 on four H100s, but 127 instead of 114 on two. The
value for three is a guess."""

FASTER_WHOLE = {2: MAX_ROWS, 3: 128, 4: 64}
"""Most rows for which sending all rows to all devices is no slower than shares, by the number of devices.

With shares on n devices a device receives 2 / n of the bytes, but devices synchronize twice. On four H100s
32 rows of 8,192 take 16 us whole and 18 or more in shares; 128 take 33 and 25. The value for three is a
guess."""

NUM_PEER_BUFFERS = 2

EMPTY = -1
"""Value of an unwritten element, as an integer of any size. All bits are ones, a NaN that is never sent."""

RANK, STATUS, ADDRESSES = range(3)
"""Indices in a table; ADDRESSES is the first of the peer buffers' addresses."""

PEER_BUFFER_COUNTS = 32
"""Index of the first counter of peer-buffer launches in a device's words. The status has a cache line of its
own."""

HANDSHAKE_COUNTS = PEER_BUFFER_COUNTS + NUM_PROGRAMS
"""Index of the first handshake launch counter."""

FLAGS = HANDSHAKE_COUNTS + MAX_PROGRAMS
"""Index of the first flag."""

LIMIT = 1 << 24
"""Polls of a flag or peer buffer before a peer counts as lost. They take tens of seconds, far longer than one
device normally waits for another."""


def peer_buffer_rows(num_devices: int) -> int:
    """Return the rows that a peer buffer must hold: a small sum, or shares of partial and of normed rows."""
    return max(MAX_ROWS, -(-2 * MAX_ROWS_BY_PEER_BUFFER[num_devices] // num_devices))


def fits_in_peer_buffers(share_bytes: int, capacity: int) -> bool:
    """Return whether two shares (partial sums and normed rows) fit into the `capacity` bytes of a peer."""
    return 2 * share_bytes <= capacity


def peer_buffers_len(num_devices: int, capacity: int) -> int:
    """Return the bytes of all peer buffers of a device; each peer may send `capacity` bytes to each."""
    return NUM_PEER_BUFFERS * (num_devices - 1) * capacity


def table_len(num_devices: int) -> int:
    """Return the number of 64-bit numbers in a device's table."""
    return ADDRESSES + 2 * num_devices


def handshakes_index(num_devices: int) -> int:
    """Return the index of the first handshake in a device's words."""
    return FLAGS + 2 * MAX_PROGRAMS * num_devices


def words_len(num_devices: int) -> int:
    """Return the number of 32-bit words of a device."""
    return handshakes_index(num_devices) + 4 * MAX_PROGRAMS * num_devices


def table_row(rank: int, peer_buffers: list[int], words: list[int]) -> list[int]:
    """Return a device's table; `peer_buffers` and `words` are the addresses of all devices."""
    return [rank, words[rank], *peer_buffers, *words]
