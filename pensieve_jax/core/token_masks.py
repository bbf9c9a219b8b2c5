"""Masks of token ids: a bit for each id of a vocabulary, in words of 32 bits.

Owns: the layout, which the host's masks and the device's counts share: id i is bit i % 32 of word i // 32.
Does not know: who makes masks, or what they are for.
"""

from __future__ import annotations

from typing import Final

import numpy as np

WORD_BITS: Final = 32
ALL_IDS: Final = -1
"""A word that allows its 32 ids."""


def num_words(vocab_size: int) -> int:
    """Return the number of words with a bit for each id."""
    return -(-vocab_size // WORD_BITS)


def bit_of(token_id: int) -> np.uint32:
    """Return the word with an id's bit."""
    return np.uint32(1 << token_id % WORD_BITS)


def every_id(num_rows: int, vocab_size: int) -> np.ndarray:
    """Return masks that allow every id, i32[num_rows, ceil(vocab_size / 32)]."""
    return np.full((num_rows, num_words(vocab_size)), ALL_IDS, np.int32)
