"""Simulated users: when each turn is sent.

Owns: sessions in progress, and the rule that turn k + 1 is sent when turn k has been answered and its user
has thought. Arrivals never wait for the engine.
Does not know: who answers, or how long it takes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from pensieve_lab.workload.arrivals import Session
from pensieve_lab.workload.turns import Answer, UserTurn


class Client:
    """Users with their sessions in progress.

    Attributes:
      num_sent: turns that were taken.
      num_refused: sessions that ended early because their next turn exceeded the context.
    """

    def __init__(self, sessions: Iterable[Session], max_context_tokens: int) -> None:
        """Schedule the first turns. A turn that leaves no room for an answer in the context is not sent."""
        self._max_context_tokens = max_context_tokens
        self._sessions: dict[str, Session] = {}
        self._due: list[tuple[float, int, UserTurn]] = []
        self._num_scheduled = 0
        self.num_sent = 0
        self.num_refused = 0
        for session in sessions:
            self._sessions[session.conversation.conversation_id] = session
            self._schedule(session, session.first_turn, session.arrival_s, session.num_history_tokens)

    @property
    def next_s(self) -> float:
        """When the next turn is sent; infinity if that depends on answers or no turn is left."""
        return self._due[0][0] if self._due else math.inf

    def take(self) -> UserTurn:
        """Return the next turn; turns at equal times keep the order in which they were scheduled."""
        self.num_sent += 1
        return heapq.heappop(self._due)[2]

    def receive(self, answer: Answer) -> None:
        """Let the user of an answer begin to think."""
        turn = answer.turn
        session = self._sessions[turn.conversation_id]
        if turn.is_last:
            del self._sessions[turn.conversation_id]
            return
        arrival_s = answer.end_s + session.think_s[turn.turn_index]
        num_tokens = turn.num_history_tokens + turn.prompt_tokens + turn.output_tokens
        self._schedule(session, turn.turn_index + 1, arrival_s, num_tokens)

    def _schedule(self, session: Session, index: int, arrival_s: float, num_history: int) -> None:
        conversation = session.conversation
        trace = conversation.turns[index]
        room = self._max_context_tokens - num_history - trace.prompt_tokens
        if room < 1:
            self.num_refused += 1
            del self._sessions[conversation.conversation_id]
            return
        turn = UserTurn(
            conversation_id=conversation.conversation_id,
            turn_index=index,
            arrival_s=arrival_s,
            num_history_tokens=num_history,
            prompt_tokens=trace.prompt_tokens,
            output_tokens=min(trace.output_tokens, room),
            is_last=index + 1 == len(conversation.turns),
            root_id=conversation.root_id,
        )
        self._num_scheduled += 1
        heapq.heappush(self._due, (arrival_s, self._num_scheduled, turn))
