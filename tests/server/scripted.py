"""A server whose model says given replies, with a tokenizer that has marks of calls as control tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.text import ChatFormat, ReplyTokens, Tokenizer
from pensieve_jax.text.replies import num_reasoning_tokens
from pensieve_jax.text.token_texts import TokenTexts
from pensieve_jax.text.tokenizer import byte_characters
from tests.server.fakes import LIMITS, FakeTurn
from tests.server.stored_engine import resolving
from tests.server.stored_server import StoredServer
from tests.text.tool_templates import QWEN3

# Id 257 ends a reply, as in `LIMITS`.
SPECIALS = ("<bos>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "</think>")


def marked_tokenizer(template: str = QWEN3, tokens: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer of 262 ids, bytes and marks as control tokens, and of `tokens` that are text."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])
    return Tokenizer(backend, eos_token="<|im_end|>", wants_bos=False, chat_template=template)


def spoken(tokenizer: Tokenizer, replies: Iterable[str]) -> Callable[[FakeTurn], None]:
    """A script: each turn samples the ids of the next reply, and then ends."""
    waiting = deque(replies)

    def script(turn: FakeTurn) -> None:
        say(turn, tokenizer, waiting.popleft())

    return script


def say(turn: FakeTurn, tokenizer: Tokenizer, text: str) -> None:
    """Sample the ids of a reply one by one, as the engine reports them."""
    params, template = turn.spec.params, turn.spec.template_input
    ending_ids = params.ending_ids(LIMITS.eos_token_ids)
    reply = ReplyTokens(params, ending_ids, params.max_tokens, tokenizer, template)
    none = np.empty(0)
    for token_id in (*tokenizer.encode(text, add_bos=False), *LIMITS.eos_token_ids):
        num_pieces = len(reply.pieces)
        reason = reply.accept(token_id, 0.0, none, none)
        turn.feed("".join(reply.pieces[num_pieces:]), (token_id,))
        if reason is not None:
            num_reasoning = num_reasoning_tokens(reply.pieces, template)
            turn.finish(reason, stop_string=reply.stop_string, reasoning_tokens=num_reasoning)
            return


class ScriptedServer(StoredServer):
    """Server in this process whose model says `replies`, one for each turn."""

    def __init__(
        self,
        path: Path,
        replies: Iterable[str],
        template: str = QWEN3,
        *,
        tokens: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        """Start; `tokens` are texts of the vocabulary beside bytes and marks."""
        tokenizer = marked_tokenizer(template, tokens)
        own = ServerSettings(**settings)
        super().__init__(
            path,
            spoken(tokenizer, replies),
            tokenizer=tokenizer,
            settings=own,
            chat_format=ChatFormat(tokenizer, parsers=own.parsers),
            token_texts=TokenTexts(tokenizer),
        )
        self.harness.services.resolver = resolving(tokenizer, self.reader, own.parsers)


def started_servers(directory: Path, template: str) -> Iterator[Callable[..., ScriptedServer]]:
    """Yield a function that starts a server with given replies, and close all of them afterwards."""
    made: list[ScriptedServer] = []

    def start(*replies: str, template: str = template) -> ScriptedServer:
        made.append(ScriptedServer(directory / f"{len(made)}.sqlite", replies, template=template))
        return made[-1]

    yield start
    for server in made:
        server.close()
