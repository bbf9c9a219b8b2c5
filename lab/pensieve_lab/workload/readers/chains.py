"""Conversion of request logs to conversations: which request continues which, and what is new in it.

Owns: the conversion of whole inputs, as a stateless service logs them, to turns that only add to their
history.
Does not know: file formats.

The context of a conversation is the sum of its prompts and answers, and a request's prompt is its recorded
input minus that context. If a service left part of an answer out of the next input (its thinking, for
example), our context is longer than the recorded one. The next prompts are shorter by the difference, but at
least 1 token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pensieve_lab.workload.trace import ConversationTrace, TurnTrace


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """Request of a stateless service.

    Attributes:
      request_id: id, unique in its log.
      time_s: arrival.
      input_tokens: tokens of its whole input, history included.
      output_tokens: tokens of its answer.
      parent_id: request whose input and answer it begins with; None if it begins a conversation.
      think_s: recorded time between the answer of its parent and its arrival, if any.
    """

    request_id: str
    time_s: float
    input_tokens: int
    output_tokens: int
    parent_id: str | None
    think_s: float | None = None


@dataclass(slots=True)
class _Chain:
    """Conversation under construction, with its first request and its latest."""

    first: LoggedRequest
    last: LoggedRequest
    session_id: str
    context_tokens: int = 0
    turns: list[TurnTrace] = field(default_factory=list)

    def add(self, request: LoggedRequest) -> None:
        prompt_tokens = max(request.input_tokens - self.context_tokens, 1)
        gap_s = request.time_s - self.last.time_s if self.turns else None
        think_s = request.think_s if self.turns else None
        self.turns.append(TurnTrace(prompt_tokens, request.output_tokens, gap_s, think_s))
        self.context_tokens += prompt_tokens + request.output_tokens
        self.last = request


def chain_requests(
    requests: Iterable[LoggedRequest], *, has_arrivals: bool = True, session_id: str | None = None
) -> Iterator[ConversationTrace]:
    """Yield conversations formed by parents, each named after its first request, in the order of those.

    `requests` must be in order of time. A request begins a new conversation if its parent is not among the
    earlier requests, was continued already (an edited prompt, a regenerated answer), or had a longer input (a
    cut history). `has_arrivals` says whether all times count from the same start. `session_id` is the session
    of all conversations. If it is None, those that descend from one request, which may be missing from the
    log, form a session that is named after it.
    """
    chains: list[_Chain] = []
    roots: dict[str, str] = {}  # root of every request so far
    open_chains: dict[str, _Chain] = {}  # by the id of their last request
    for request in requests:
        chain = open_chains.get(request.parent_id) if request.parent_id is not None else None
        if chain is None or request.input_tokens <= chain.last.input_tokens:
            before = request.parent_id or request.request_id
            root = session_id or roots.get(before, before)
            chain = _Chain(first=request, last=request, session_id=root)
            chains.append(chain)
        else:
            del open_chains[chain.last.request_id]
        chain.add(request)
        open_chains[request.request_id] = chain
        roots[request.request_id] = chain.session_id
    for chain in chains:
        arrival_s = chain.first.time_s if has_arrivals else None
        name = chain.first.request_id
        part_of = chain.session_id if chain.session_id != name else None
        yield ConversationTrace(name, tuple(chain.turns), arrival_s, part_of)
