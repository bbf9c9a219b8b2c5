"""Chained hashes that identify a list of messages.

Owns: the canonical form of a message, and the chain: the hash of a message and the chain before it.
Does not know: turns. How messages were grouped into turns does not change a chain.
Called by the resolver and the turn index.

The hash covers a message's role, its text without trailing white space, because clients trim it, its name,
its tool calls, and the id of the call that it answers. Arguments of calls count as JSON values, since clients
parse and write them again. Reasoning does not count, since clients leave it out; neither do the ids of calls,
which results repeat. A chain starts from the owner, the model, the chat template, the tools and the
template's arguments, since the KV cache is shared only where all of them are equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.text.call_arguments import canonical_arguments
from pensieve_jax.text.messages import Message, content_of

CHAIN_BYTES = 16


def root_chain(
    owner: str, fingerprint: str, chat_template: str | None, template_input: TemplateInput = NO_INPUT
) -> bytes:
    """Return the chain of the empty message list for an owner, a model, and what a template writes."""
    digest = hashlib.blake2b(digest_size=CHAIN_BYTES, person=b"pensieve-context")
    for part in (owner, fingerprint, chat_template or ""):
        _add(digest, part)
    if template_input.tools or template_input.arguments:
        # Tools keep the order of their keys, which the template writes.
        _add(digest, json.dumps(template_input.tools))
        _add(digest, json.dumps(template_input.arguments, sort_keys=True))
    return digest.digest()


def chain_after(chain: bytes, message: Message) -> bytes:
    """Return the chain after one more message."""
    digest = hashlib.blake2b(chain, digest_size=CHAIN_BYTES)
    _add(digest, message["role"])
    _add(digest, canonical_text(content_of(message)))
    for key in ("name", "tool_call_id"):
        if message.get(key):
            _add(digest, key)
            _add(digest, message[key])
    for call in message.get("tool_calls") or ():
        function = call["function"]
        for part in ("call", function["name"], canonical_arguments(function["arguments"])):
            _add(digest, part)
    return digest.digest()


def chains_of(root: bytes, messages: Iterable[Message]) -> list[bytes]:
    """Return for each message the chain of all messages up to and including it."""
    chains, chain = [], root
    for message in messages:
        chain = chain_after(chain, message)
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
