"""Drafts from a conversation's own history: what followed where its last tokens occurred before.

Owns: an index of the ids of each turn in progress, the share of its drafts that hold, and the decision
whether drafts are worth the wait for ids that they need.
Does not know: how drafts are checked (`Scheduler`, `Engine`), devices or text.
Called by the engine and the ledger.

A draft begins with the id that was sampled last, so a step with drafts cannot be scheduled before the ids of
the previous step are known. Then the device waits for the host. So drafts have to gain more than that: see
`WAIT_FROM`. While no step drafts, the same is measured on the ids that arrive, at the cost of the lookups
alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.engine.suffix_automaton import SuffixAutomaton
from pensieve_jax.scheduler import Request

MIN_MATCH: Final = 3
"""Tokens that must occur before; a draft behind fewer rarely holds."""
MAX_NUM_ROWS: Final = 32
"""The most running requests beside which a step drafts, and the most indexed turns."""
WAIT_FROM: Final = 1.4
"""Tokens per request and step from which drafts are worth the wait. On an H200, the host's work is 3.4 ms of
a step of 8.7 ms (13B), which the device otherwise hides."""
TOKEN_COST: Final = 1 / 512
"""The time of one more token of a step, in steps: 15.5 us of 8.7 ms, for up to 128 tokens."""
MAX_INDEXED: Final = 32_768
"""The most recent ids that an index begins with. It is made anew once it holds twice as many."""
MAX_RELATED: Final = 8192
"""The most ids of other branches in an index."""
INDEXED_PER_STEP: Final = 512
"""Ids of waiting turns' histories that a step indexes: about 1.3 ms, while the device computes."""
BYTES_PER_ID: Final = 320
"""The most memory of an index for each of its ids. In CPython 3.12 text takes 100 bytes, and random ids take
100 to 180; the most are 302, of random ids of two values."""
_WINDOW: Final = 32
_PRIOR_STEPS: Final = 4  # steps without a draft, with which a window begins


def index_bytes(num_running: int, context_tokens: int) -> int:
    """Return the most host memory that all indexes take together.

    Args:
      num_running: the most requests in the batch.
      context_tokens: the longest context.
    """
    num_ids = min(context_tokens + MAX_RELATED, _most_ids())
    return min(num_running, MAX_NUM_ROWS) * num_ids * BYTES_PER_ID


class _Row:
    """One turn in progress: its index, and how well recent drafts would have held.

    Attributes:
      request: the turn's request.
      related: ids of other branches that are to be indexed first, each branch on its own.
      index: index of the ids up to `num_indexed`; None until the turn's first token.
      num_indexed: number of the request's tokens that the index holds, or leaves out as too old.
    """

    __slots__ = (
        "_draft",
        "_max_num",
        "_num_held",
        "_steps",
        "_sum_drafted",
        "_sum_held",
        "index",
        "num_indexed",
        "related",
        "request",
    )

    def __init__(self, request: Request, related: Sequence[Sequence[int]], max_num: int) -> None:
        """Start without an index; drafts have at most `max_num` tokens."""
        self.request = request
        self.related = [list(ids) for ids in related]
        self.index: SuffixAutomaton | None = None
        self.num_indexed = 0
        self._max_num = max_num
        self._draft: Sequence[int] = ()
        self._num_held = 0
        self._steps: deque[tuple[int, int]] = deque()  # by step: tokens drafted, and those that held
        self._sum_drafted = self._sum_held = 0

    @property
    def num_known(self) -> int:
        """Number of the request's ids that are known: all but a placeholder."""
        token_ids = self.request.token_ids
        return len(token_ids) - (token_ids[-1] == PENDING_TOKEN)

    def tokens_per_step(self) -> float:
        """Return the expected tokens of a step with a draft."""
        return 1 + self._sum_held / (len(self._steps) + _PRIOR_STEPS)

    def held_share(self) -> float:
        """Return the share of recently drafted tokens that held; it begins with 1."""
        return (1 + self._sum_held) / (1 + self._sum_drafted)

    def draft(self, limit: int) -> Sequence[int]:
        """Begin a step: return the tokens that may follow, at most `limit`."""
        self._begin_draft(limit)
        return self._draft

    def follow(self, token_ids: Iterable[int]) -> None:
        """Add the turn's next ids to the index, and compare them with the draft."""
        assert self.index is not None
        for token_id in token_ids:
            self.index.append(token_id)
            if self._num_held < len(self._draft) and self._draft[self._num_held] == token_id:
                self._num_held += 1
            else:  # the id that a step samples behind the tokens that held
                self._end_draft()
                self._begin_draft(self._max_num)
            self.num_indexed += 1

    def catch_up(self, max_num: int) -> int:
        """Index at most `max_num` ids that the turn has already; returns how many it indexed."""
        token_ids, num_known = self.request.token_ids, self.num_known
        if self.index is None or len(self.index.token_ids) > _most_ids():
            if self.index is not None:
                self.related = []
            self.index = SuffixAutomaton()
            self.num_indexed = max(num_known - MAX_INDEXED, 0)
        num_done = 0
        while self.related and num_done < max_num:
            ids = self.related[0]
            part = ids[: max_num - num_done]
            for token_id in part:
                self.index.append(token_id)
            num_done += len(part)
            del ids[: len(part)]
            if not ids:
                self.index.separate()
                del self.related[0]
        part = token_ids[self.num_indexed : min(self.num_indexed + max_num - num_done, num_known)]
        for token_id in part:
            self.index.append(token_id)
        self.num_indexed += len(part)
        if part and self.num_indexed == num_known:
            self._begin_draft(self._max_num)
        return num_done + len(part)

    def _begin_draft(self, limit: int) -> None:
        index = self.index
        self._num_held = 0
        self._draft = ()
        if index is not None and index.match_len >= MIN_MATCH:
            self._draft = index.continuation(min(limit, self._max_num))

    def _end_draft(self) -> None:
        steps, step = self._steps, (len(self._draft), self._num_held)
        steps.append(step)
        self._sum_drafted += step[0]
        self._sum_held += step[1]
        if len(steps) > _WINDOW:
            num_drafted, num_held = steps.popleft()
            self._sum_drafted -= num_drafted
            self._sum_held -= num_held


class HistoryDrafter:
    """The drafts of the turns in progress."""

    def __init__(self, max_num_tokens: int) -> None:
        """Start without turns; a draft has at most `max_num_tokens` tokens."""
        self._max_num_tokens = max_num_tokens
        self._rows: dict[Request, _Row] = {}
        self._num_running = 0

    def add(self, request: Request, related: Callable[[], Sequence[Sequence[int]]]) -> None:
        """Draft for a new request, unless a choice of its ids depends on the ids before.

        `related` returns ids of other branches of its conversation, to be found as well.
        """
        if request.penalties is None:
            self._rows[request] = _Row(request, related(), self._max_num_tokens)

    def drop(self, request: Request) -> None:
        """Forget a request, which may not be known."""
        self._rows.pop(request, None)

    def pays(self, running: Collection[Request], num_waiting: int) -> bool:
        """Return whether the next step should wait for the ids that drafts need."""
        self._num_running = num_running = len(running)
        if num_waiting or not 0 < num_running <= MAX_NUM_ROWS:
            return False
        num_tokens = 0.0
        for request in running:
            if not request.is_decoding:
                return False
            row = self._rows.get(request)
            num_tokens += row.tokens_per_step() if row is not None and self._is_worth_it(row) else 1.0
        return num_tokens >= WAIT_FROM * num_running

    def draft(self, request: Request, limit: int) -> Sequence[int]:
        """Return tokens that may follow those of a request, at most `limit`; see `scheduler.Draft`."""
        row = self._rows.get(request)
        if row is None or not self._is_worth_it(row):
            return ()
        return row.draft(limit)

    def accept(self, request: Request, position: int, token_ids: Sequence[int]) -> None:
        """Continue with the ids of a request from `position` on, which its list has already."""
        row = self._rows.get(request)
        # A row that is behind reads them in `catch_up`.
        if row is not None and row.index is not None and row.num_indexed == position and not row.related:
            row.follow(token_ids)

    def catch_up(self, running: Iterable[Request]) -> None:
        """Index a part of the tokens of running requests that are not indexed yet, in their order."""
        if self._num_running > MAX_NUM_ROWS:
            return
        num_left = INDEXED_PER_STEP
        for request in running:
            row = self._rows.get(request)
            if row is not None and request.is_decoding and (row.index is not None or self._has_place()):
                num_left -= row.catch_up(num_left)
                if num_left <= 0:
                    return

    def _has_place(self) -> bool:
        """Return whether one more turn may have an index; suspended turns keep theirs."""
        return sum(row.index is not None for row in self._rows.values()) < MAX_NUM_ROWS

    def _is_worth_it(self, row: _Row) -> bool:
        """Return whether a row's drafts save more than the time of their tokens at this load."""
        return row.num_indexed == row.num_known and row.held_share() > TOKEN_COST * self._num_running


def _most_ids() -> int:
    """Return the ids of an index above which it is made anew."""
    return 2 * (MAX_INDEXED + MAX_RELATED)
