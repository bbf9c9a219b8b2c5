"""Chained hashes that identify a list of messages.

Owns: the canonical form of a message, and the chain: the hash of a message and the chain before it.
Does not know: turns. How messages were grouped into turns does not change a chain.
Called by the resolver and the turn index.

The hash covers a message's role and its text without trailing white space, because clients trim it. Ids,
names and annotations do not count. A chain starts from the owner, the model and the chat template, since the
KV cache is shared only where all three are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from pensieve_jax.text.messages import Message

CHAIN_BYTES = 16


def root_chain(owner: str, fingerprint: str, chat_template: str | None) -> bytes:
    """Return the chain of the empty message list for an owner, a model and a chat template."""
    digest = hashlib.blake2b(digest_size=CHAIN_BYTES, person=b"pensieve-context")
    for part in (owner, fingerprint, chat_template or ""):
        _add(digest, part)
    return digest.digest()


def chain_after(chain: bytes, role: str, text: str) -> bytes:
    """Return the chain after one more message."""
    digest = hashlib.blake2b(chain, digest_size=CHAIN_BYTES)
    _add(digest, role)
    _add(digest, canonical_text(text))
    return digest.digest()


def chains_of(root: bytes, messages: Iterable[Message]) -> list[bytes]:
    """Return for each message the chain of all messages up to and including it."""
    chains, chain = [], root
    for message in messages:
        chain = chain_after(chain, message["role"], message["content"])
        chains.append(chain)
    return chains


def canonical_text(text: str) -> str:
    """Return the part of a message's text that the hash covers."""
    return text.rstrip()


def _add(digest: hashlib.blake2b, part: str) -> None:
    # The length comes first, so that "a" + "bc" and "ab" + "c" differ. Lone surrogates are rejected later.
    encoded = part.encode("utf-8", "surrogatepass")
    digest.update(len(encoded).to_bytes(8, "little"))
    digest.update(encoded)
