"""What identifies a list of messages: one hash, folded over them.

Owns: the canonical form of a message, and the hash that goes on from message to message.
Does not know: turns; how messages fell into turns does not change a chain.

Of a message its role and its text count, without white space at the end, which clients trim. Ids, names and
annotations do not count. A chain begins with whoever may share state at all: an owner, a model, a template.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from pensieve_jax.text.messages import Message

CHAIN_BYTES = 16


def root_chain(owner: str, fingerprint: str, chat_template: str | None) -> bytes:
    """The chain of no messages: of an owner, under a model and a template."""
    digest = hashlib.blake2b(digest_size=CHAIN_BYTES, person=b"pensieve-context")
    for part in (owner, fingerprint, chat_template or ""):
        _add(digest, part)
    return digest.digest()


def chain_after(chain: bytes, role: str, text: str) -> bytes:
    """The chain of the messages of `chain` and one more."""
    digest = hashlib.blake2b(chain, digest_size=CHAIN_BYTES)
    _add(digest, role)
    _add(digest, canonical_text(text))
    return digest.digest()


def chains_of(root: bytes, messages: Iterable[Message]) -> list[bytes]:
    """For each message the chain of all messages up to and including it."""
    chains, chain = [], root
    for message in messages:
        chain = chain_after(chain, message["role"], message["content"])
        chains.append(chain)
    return chains


def canonical_text(text: str) -> str:
    """What counts of a message's text."""
    return text.rstrip()


def _add(digest: hashlib.blake2b, part: str) -> None:
    # With its length in front: "a" + "bc" and "ab" + "c" must differ. Lone surrogates are refused later.
    encoded = part.encode("utf-8", "surrogatepass")
    digest.update(len(encoded).to_bytes(8, "little"))
    digest.update(encoded)
