"""Responses that run by themselves: in the background, or for whoever repeats their request.

Owns: what is known of such a response while it runs, and waking those who follow it.
Does not know: HTTP, engines, or how events are written.

What is kept of a running reply is its tokens only. The events of its stream are made from them, one for
each token that shows text, so that their numbers are a function of the tokens: whoever comes back, after the
end or after a crash too, gets the same ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from pensieve_jax.core.outputs import TokenLogprob
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.openai.responses.response import ResponseHead

type Token = tuple[int, TokenLogprob | None]
"""An id, with its log-probabilities where those were asked for and are not kept."""


class ResponseRun:
    """A response from its request to its end. Used by the event loop's thread only.

    Attributes:
      owner: whose it is.
      body_sha256: of its request.
      head: None until it is known which turn it is.
      background: whether its client was told that it is queued.
      is_started: whether the engine has it.
      is_abandoned: a client left before it was told which response this is.
      response: the response object, once it has ended with a reply, or was cancelled.
      error: what it failed with.
      task: what drives it.
    """

    def __init__(self, owner: str, body_sha256: str, *, background: bool) -> None:
        """Nothing of it has happened yet."""
        self.owner = owner
        self.body_sha256 = body_sha256
        self.background = background
        self.head: ResponseHead | None = None
        self.is_started = False
        self.is_abandoned = False
        self.response: dict[str, Any] | None = None
        self.error: ApiError | None = None
        self.task: asyncio.Task[None] | None = None
        self._tokens: list[Token] = []
        self._changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether anything can still come of it."""
        return self.response is not None or self.error is not None

    def begin(self, head: ResponseHead) -> None:
        """It is known which turn it is."""
        self.head = head
        self._wake()

    def begin_again(self) -> None:
        """Its engine ended, and another one samples it once more with the same seed, from the start."""
        self.is_started = False
        self._tokens = []

    def take(self, token_ids: Iterable[int], logprobs: Iterable[TokenLogprob] | None = None) -> None:
        """So much more of its reply; log-probabilities, if there are any, are one for each token."""
        self.is_started = True
        self._tokens += (
            [(token_id, None) for token_id in token_ids]
            if logprobs is None
            else zip(token_ids, logprobs, strict=True)
        )
        self._wake()

    def end(self, response: dict[str, Any]) -> None:
        """It has ended with this response object."""
        self.response = response
        self._wake()

    def fail(self, error: ApiError) -> None:
        """It has ended with an error."""
        self.error = error
        self._wake()

    async def known(self) -> ResponseHead:
        """Wait until it is known which turn it is; raises what it failed with before."""
        while self.head is None:
            if self.error is not None:
                raise self.error
            await self._change()
        return self.head

    async def result(self) -> dict[str, Any]:
        """Wait for the response object; raises what it failed with."""
        while self.response is None:
            if self.error is not None:
                raise self.error
            await self._change()
        return self.response

    async def tokens(self) -> AsyncIterator[Token]:
        """The tokens of its reply from the first one on, as they come, until it has ended."""
        position = 0
        while True:
            while position < len(self._tokens):
                yield self._tokens[position]
                position += 1
            if self.has_ended:
                return
            await self._change()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()
