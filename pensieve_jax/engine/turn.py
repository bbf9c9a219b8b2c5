"""A turn as its caller sees it, and holds it.

Owns: what a caller has read of a reply. That somebody holds it is what keeps a turn running.
Does not know: how the reply comes about (`Reply`), or who runs it.
Called by: whoever submitted it. The engine refers to it weakly only.
"""

from __future__ import annotations

from collections.abc import Sequence

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import Delta, Output
from pensieve_jax.core.turn_node import TurnOrigin
from pensieve_jax.engine.reply import Reply
from pensieve_jax.scheduler import Request
from pensieve_jax.text import Message


class Turn:
    """One submitted turn. It belongs to whoever holds it: dropped before its end, it is cancelled.

    The engine sees that at its next call. So a turn is somebody's from the moment of its acceptance on,
    however the call that submitted it ends, and no code has to run for that.

    Attributes:
      reply: what the engine fills.
    """

    __slots__ = ("__weakref__", "_num_streamed", "reply")

    def __init__(self, reply: Reply) -> None:
        """Nothing of it was read."""
        self.reply = reply
        self._num_streamed = (0, 0)  # pieces of text, ids

    @property
    def request(self) -> Request:
        """What the scheduler holds."""
        return self.reply.request

    @property
    def messages(self) -> tuple[Message, ...] | None:
        """The chat messages that the prompt was rendered from; None for text or ids."""
        return self.reply.messages

    @property
    def origin(self) -> TurnOrigin | None:
        """What a turn with a node was found to go on from in memory; None for one without."""
        return self.reply.origin

    @property
    def output(self) -> Output | None:
        """The result, once the turn has ended."""
        return self.reply.output

    @property
    def error(self) -> PensieveError | None:
        """Why there is no output, if a step failed."""
        return self.reply.error

    @property
    def done(self) -> bool:
        """It has an output or an error."""
        return self.reply.done

    @property
    def token_ids(self) -> Sequence[int]:
        """The reply so far."""
        return self.reply.token_ids

    @property
    def text(self) -> str:
        """The reply so far, as far as it can be shown."""
        return self.reply.text

    def result(self) -> Output:
        """The output of a turn that is done; raises what it failed with, and PensieveError before its end."""
        if self.error is not None:
            raise self.error
        if self.output is None:
            raise PensieveError("The turn has not ended, so it has no output yet; step until it is done.")
        return self.output

    def take_delta(self) -> Delta | None:
        """What came since the last call; None if nothing did."""
        pieces, token_ids = self.reply.pieces, self.reply.token_ids
        num_pieces, num_ids = self._num_streamed
        if len(token_ids) == num_ids:
            return None
        self._num_streamed = (len(pieces), len(token_ids))
        return Delta("".join(pieces[num_pieces:]), tuple(token_ids[num_ids:]))
