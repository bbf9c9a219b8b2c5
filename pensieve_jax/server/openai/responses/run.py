"""Responses that run as tasks, independent of a connection: background responses, and requests with a key.

Owns: the state of such a response while it runs, and waking its followers.
Does not know: HTTP, engines, or how events are encoded. Called by the other modules of `openai.responses`.

A run keeps the pieces of the reply, which are a function of its tokens. The events of its stream are made
from them, so a client that reconnects gets the same numbers, even after the end or after a crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from pensieve_jax.server.async_engine import AsyncDelta
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.openai.responses.pieces import MAX_BATCH, ReplyPieces, TextPiece
from pensieve_jax.server.openai.responses.response import ResponseHead
from pensieve_jax.text.replies import shown_marks


class ResponseRun:
    """The state of one response from its request to its end. Used by the event loop's thread only.

    Attributes:
        owner: the key owner of the response.
        body_sha256: SHA-256 digest of the request's raw body.
        head: the response head; None until its turn is known.
        background: whether it is a background response.
        is_started: whether the engine has produced tokens of it.
        is_abandoned: whether a client left before it got the response's id.
        response: the response object, once it has ended with a reply or was cancelled.
        error: the error that it failed with.
        task: the task that runs it.
    """

    def __init__(
        self,
        owner: str,
        body_sha256: str,
        new_pieces: Callable[[Sequence[str]], ReplyPieces],
        *,
        background: bool,
    ) -> None:
        """Start without a head and without tokens.

        `new_pieces` begins the pieces of a reply, given the control tokens that its text shows.
        """
        self.owner = owner
        self.body_sha256 = body_sha256
        self.background = background
        self.head: ResponseHead | None = None
        self.is_started = False
        self.is_abandoned = False
        self.response: dict[str, Any] | None = None
        self.error: ApiError | None = None
        self.task: asyncio.Task[None] | None = None
        self._new_pieces = new_pieces
        self._splitter: ReplyPieces | None = None
        self._pieces: list[TextPiece] = []
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether the response has ended, with a response object or an error."""
        return self.response is not None or self.error is not None

    def begin(self, head: ResponseHead) -> None:
        """Set the head, now that the turn is known."""
        self.head = head
        self._wake()

    def begin_again(self) -> None:
        """Forget the reply: a restarted engine samples the reply again from the start with the same seed."""
        self.is_started = False
        self._splitter = None
        self._pieces = []
        self._token_ids = []
        self._texts = []

    def take(self, delta: AsyncDelta) -> None:
        """Add a part of the reply."""
        self.is_started = True
        self._token_ids += delta.token_ids
        self._texts.append(delta.text)
        if self._splitter is None:
            shown = () if self.head is None else shown_marks(self.head.template_input)
            self._splitter = self._new_pieces(shown)
        self._pieces += self._splitter.split(delta)
        self._wake()

    def has_taken(self, reply: AsyncDelta) -> bool:
        """Return whether the parts so far are this whole reply."""
        return self._token_ids == list(reply.token_ids) and "".join(self._texts) == reply.text

    def end(self, response: dict[str, Any]) -> None:
        """End the run with this response object."""
        self.response = response
        self._wake()

    def fail(self, error: ApiError) -> None:
        """End the run with this error."""
        self.error = error
        self._wake()

    async def known(self) -> ResponseHead:
        """Wait for the head; raise the error if the run fails before."""
        while self.head is None:
            if self.error is not None:
                raise self.error
            await self._change()
        return self.head

    async def result(self) -> dict[str, Any]:
        """Wait for the response object; raise the error if the run fails."""
        while self.response is None:
            if self.error is not None:
                raise self.error
            await self._change()
        return self.response

    async def pieces(self) -> AsyncIterator[Sequence[TextPiece]]:
        """Yield the pieces of the reply from the first one on, in batches, until the run ends."""
        position = 0
        while True:
            while batch := self._pieces[position : position + MAX_BATCH]:
                yield batch
                position += len(batch)
            if self.has_ended:
                return
            await self._change()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()
