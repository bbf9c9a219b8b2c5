"""Branches: conversations whose callers place each turn in a tree, by naming its parent.

Owns: the branches in memory, indexed by the turns on their paths, and the choice of the branch that a turn
extends or forks.
Does not know: how turns are run or committed, when branches leave memory, or where their KV cache is.
Called by `ConversationTable`, the submission of turns, and the ledger.

A branch is a path of turns in memory, with one cached sequence. A turn whose parent is the tip of an idle
branch extends that branch. Every other turn begins a new branch, which shares the full chunks of the longest
known beginning (`CacheManager.fork`). So siblings run concurrently, and a turn is never refused as busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from pensieve_jax.cache import CachedSequence, CacheManager
from pensieve_jax.core.conversation import Conversation
from pensieve_jax.core.errors import InvalidRequestError, UnknownTurnError
from pensieve_jax.core.turn_node import TurnNode, TurnOrigin
from pensieve_jax.engine.chunk_index import ChunkIndex
from pensieve_jax.engine.live import Branch, TurnEnd, replace_tokens
from pensieve_jax.history import HistoryStore

_MAX_BESIDE: Final = 8  # branches that `tails_beside` looks at
type Parent = tuple[str, str, bool]
"""Owner, id of the parent turn, and whether the turns after it are to be stored in the history."""


class TurnPosition(NamedTuple):
    """The position of a turn in its tree: the path to its parent.

    Attributes:
      branch: a branch in memory with that path; None if the path comes from the history or is empty.
      path: the turns on the path by id, in order.
      token_ids: all tokens of the path.
      num_shared: number of leading tokens whose KV cache `branch` can have.
      last_active_s: for a path from the history, when its last turn was committed.
    """

    branch: Branch | None
    path: dict[str, TurnEnd]
    token_ids: list[int]
    num_shared: int = 0
    last_active_s: float = 0.0


class BranchTable:
    """The branches in memory, and the search for the one that a turn continues."""

    def __init__(
        self,
        store: HistoryStore,
        cache: CacheManager,
        enter: Callable[[Branch], None],
        *,
        shares_state: bool,
    ) -> None:
        """Start without branches.

        `enter` is called for each new branch. With `shares_state` False, branches share no chunks.
        """
        self._store = store
        self._cache = cache
        self._enter = enter
        self._shares_state = shares_state
        self._by_turn: dict[tuple[str, str], dict[Branch, None]] = {}
        self._by_owner: dict[str, dict[Branch, None]] = {}
        self._by_root: dict[tuple[str, str], dict[Branch, None]] = {}  # by activity, the latest last
        self._running: set[str] = set()  # turns in progress
        self._chunks: ChunkIndex[Branch] = ChunkIndex(cache.chunk_tokens)
        self._num_opened = 0

    def __len__(self) -> int:
        """Return the number of turns in memory."""
        return len(self._by_turn)

    @property
    def num_chunks(self) -> int:
        """Number of distinct chunks in the index of contexts."""
        return len(self._chunks)

    def of(self, owner: str) -> Iterator[Branch]:
        """Yield an owner's branches, the oldest first."""
        yield from self._by_owner.get(owner, ())

    def at(self, owner: str, turn_id: str) -> list[Branch]:
        """Return the branches whose tip is a turn, else those that contain it; empty if not in memory."""
        branches = self._by_turn.get((owner, turn_id), {})
        return [branch for branch in branches if branch.tip == turn_id] or list(branches)

    def containing(self, owner: str, turn_id: str) -> list[Branch]:
        """Return all branches that contain a turn."""
        return list(self._by_turn.get((owner, turn_id), ()))

    def tails_beside(self, branch: Branch, max_num: int) -> list[list[int]]:
        """Return what other branches with a turn of this one's path have behind their last common turn.

        The most recently active branches come first. The lists have at most `max_num` ids together.
        """
        recent = reversed(self._by_root.get((branch.owner, branch.root or ""), {}))
        tails: list[list[int]] = []
        for other in [one for one in islice(recent, _MAX_BESIDE + 1) if one is not branch][:_MAX_BESIDE]:
            if max_num <= 0:
                break
            num_shared = max(end.num_shared for turn_id, end in other.path.items() if turn_id in branch.path)
            tail = other.conversation.token_ids[num_shared : other.conversation.num_history_tokens][:max_num]
            max_num -= len(tail)
            if tail:
                tails.append(tail)
        return tails

    def longest(self, owner: str, context: list[int]) -> tuple[Branch, int] | None:
        """Return the branch with the longest common beginning, and its number of tokens, or None.

        The context's last token is never shared: a step must compute it, to sample the next one.
        """
        return self._chunks.longest(owner, context[:-1])

    def find(self, node: TurnNode, known: dict[Parent, TurnPosition] | None = None) -> TurnPosition:
        """Find the position of a turn; `known` caches the positions of other turns of the same call.

        Raises UnknownTurnError for a parent that this owner does not have, InvalidRequestError for an id that
        is already used or for a durable turn after a parent that the history will never have, and
        HistoryError.
        """
        if node.turn_id in self._running or (node.owner, node.turn_id) in self._by_turn:
            raise InvalidRequestError("turn_id", node.turn_id, "the id of a new turn")
        if node.parent_id is None:
            return TurnPosition(None, {}, [])
        parent = (node.owner, node.parent_id, node.durable)
        place = None if known is None else known.get(parent)
        if place is None:
            place = self._behind(*parent)
            if known is not None:
                known[parent] = place
        return place._replace(path=dict(place.path))

    def begin(
        self,
        node: TurnNode,
        place: TurnPosition,
        prompt: Sequence[int],
        *,
        twin: Branch | None,
        keep: int | None,
    ) -> tuple[Branch, TurnOrigin]:
        """Choose or open the branch that a turn will run in, without its prompt.

        `twin` is the branch of an earlier turn of the same call with the same parent, prompt and `keep`. A
        branch that was in memory still has all tokens of the path; a new one has replaced those from `keep`
        on.
        """
        num_kept = len(place.token_ids) if keep is None else keep
        if place.branch is not None:  # an earlier turn of the same call may replace the end of its tokens
            num_known = place.branch.conversation.num_history_tokens
            place = place._replace(num_shared=min(place.num_shared, num_known))
        branch, origin = self._begin(node, place, prompt, twin, num_kept)
        self._note_active(branch)
        self._running.add(node.turn_id)
        return branch, origin

    def replace_from(self, branch: Branch, num_tokens: int) -> None:
        """Index no chunk of a branch from this token on, since its turn in progress replaces it."""
        self._chunks.cut(branch, num_tokens // self._cache.chunk_tokens)

    def prepare_twins(self, branch: Branch, num_prompt: int) -> None:
        """Let the turns that will fork this branch share all its tokens and the first prompt to run.

        The last of the `num_prompt` tokens of their prompt is not shared, since each turn must compute it.
        """
        if self._shares_state:
            num_history = branch.conversation.num_history_tokens
            self._cache.prepare_fork(branch.sequence, num_history + num_prompt - 1)

    def settled(self, branch: Branch, node: TurnNode, keep: int, replaced: Sequence[int]) -> None:
        """Add an answered turn to its branch; its tokens are history now.

        They have `replaced` those of the path from `keep` on.
        """
        self._running.remove(node.turn_id)
        replace_tokens(branch.path, keep, replaced)
        branch.path[node.turn_id] = TurnEnd(branch.conversation.num_history_tokens, node.durable)
        self._by_turn.setdefault((branch.owner, node.turn_id), {})[branch] = None
        self._note_active(branch)
        if self._shares_state:
            self._chunks.enter(branch)

    def withdrawn(self, branch: Branch, node: TurnNode, origin: TurnOrigin) -> bool:
        """Remove a turn that failed or was cancelled; returns whether its branch existed only for it."""
        self._running.remove(node.turn_id)
        self._note_active(branch)
        if self._shares_state:
            self._chunks.enter(branch)  # what the turn would have replaced
        tip = branch.tip
        return tip is None or (origin.kind != "extended" and len(self._by_turn[branch.owner, tip]) > 1)

    def cut(self, branch: Branch, turn_id: str) -> None:
        """Remove the turns after `turn_id` from an idle branch, with their KV cache."""
        kept, context = branch.path_to(turn_id), branch.context_of(turn_id)
        num_shared = branch.path[turn_id].num_shared
        self._leave(branch, [name for name in branch.path if name not in kept])
        self._chunks.leave(branch)
        branch.path = kept
        branch.conversation.truncate(num_shared, len(kept))
        branch.conversation.extend_history(context[num_shared:])  # what a removed turn had replaced
        self._cache.truncate(branch.sequence, num_shared)
        if self._shares_state:
            self._chunks.enter(branch)

    def forget(self, branch: Branch) -> None:
        """Remove a branch that leaves memory."""
        self._leave(branch, branch.path)
        if branch.root is not None:
            _remove(self._by_root, (branch.owner, branch.root), branch)
        del self._by_owner[branch.owner][branch]
        if not self._by_owner[branch.owner]:
            del self._by_owner[branch.owner]
        self._chunks.leave(branch)

    # Private methods

    def _leave(self, branch: Branch, turn_ids: Iterable[str]) -> None:
        """Remove a branch from the index of these turns."""
        for turn_id in turn_ids:
            _remove(self._by_turn, (branch.owner, turn_id), branch)

    def _note_active(self, branch: Branch) -> None:
        """Make a branch the last of those with its root. One without a turn has none yet."""
        if branch.root is not None:
            branches = self._by_root.setdefault((branch.owner, branch.root), {})
            branches.pop(branch, None)
            branches[branch] = None

    def _behind(self, owner: str, parent_id: str, durable: bool) -> TurnPosition:
        """Return the position of turns with this parent, from memory or from the history."""
        for branch in self.at(owner, parent_id)[:1]:
            end = branch.path[parent_id]
            if durable and not end.durable:
                limit = f"False after the turn {parent_id}, which is kept in memory only"
                raise InvalidRequestError("durable", durable, limit)
            if end.durable and not self._store.has_turn(owner, parent_id):  # its response was deleted
                raise UnknownTurnError(parent_id)
            num_shared = min(end.num_shared, branch.conversation.num_history_tokens)
            return TurnPosition(branch, branch.path_to(parent_id), branch.context_of(parent_id), num_shared)
        record = self._store.load_turn(owner, parent_id)
        path: dict[str, TurnEnd] = {}
        token_ids: list[int] = []
        for turn in record.turns:
            if turn.keep is not None:
                replace_tokens(path, turn.keep, token_ids[turn.keep :])
                del token_ids[turn.keep :]
            token_ids += turn.prompt_token_ids + turn.output_token_ids
            path[turn.turn_id] = TurnEnd(len(token_ids), True)
        return TurnPosition(None, path, token_ids, last_active_s=record.last_active_s)

    def _begin(
        self, node: TurnNode, place: TurnPosition, prompt: Sequence[int], twin: Branch | None, num_kept: int
    ) -> tuple[Branch, TurnOrigin]:
        if twin is not None:
            num_context = num_kept + len(prompt) - 1
            return self._open(node, place, twin, num_context, num_kept), TurnOrigin("forked", num_context)
        parent = place.branch
        if parent is not None and not parent.busy and parent.tip == node.parent_id:
            return parent, TurnOrigin("extended", num_kept)
        found = self.longest(node.owner, [*place.token_ids[:num_kept], *prompt])
        source, num_found = (None, 0) if found is None else found
        num_shared = min(place.num_shared, num_kept)
        if parent is not None and num_found < num_shared:
            source, num_found = parent, num_shared
        branch = self._open(node, place, source, num_found, num_kept)
        if parent is not None:
            return branch, TurnOrigin("forked", num_found)
        if node.parent_id is not None:
            branch.sequence.last_active_s = place.last_active_s
            return branch, TurnOrigin("loaded", num_found)
        return branch, TurnOrigin("chunks" if num_found else "new", num_found)

    def _open(
        self, node: TurnNode, place: TurnPosition, source: Branch | None, num_tokens: int, num_kept: int
    ) -> Branch:
        """Open a branch with the turns of the path, sharing the first `num_tokens` tokens of a source.

        Its turn replaces the tokens of the path from `num_kept` on.
        """
        self._num_opened += 1
        name = f"\0branch-{self._num_opened}"  # never a caller's id: those have no NUL
        num_history = len(place.token_ids)
        conversation = Conversation(
            name,
            list(place.token_ids),
            num_history_tokens=num_history,
            num_computed_tokens=max(num_history - 1, 0),
            num_turns=len(place.path),
        )
        if num_kept < num_history:
            conversation.replace_from(num_kept)
        branch = Branch(
            conversation, self._begin_with(name, source, num_tokens), owner=node.owner, path=place.path
        )
        self._by_owner.setdefault(branch.owner, {})[branch] = None
        for turn_id in branch.path:
            self._by_turn.setdefault((branch.owner, turn_id), {})[branch] = None
        if self._shares_state:
            if place.branch is not None:
                num_shared = min(place.num_shared, num_kept)
                self._chunks.share(branch, place.branch, num_shared // self._cache.chunk_tokens)
            self._chunks.enter(branch)
        self._enter(branch)
        return branch

    def _begin_with(self, name: str, source: Branch | None, num_tokens: int) -> CachedSequence:
        if source is None or not self._shares_state:
            return self._cache.open(name)
        return self._cache.fork(source.sequence, num_tokens, name)


def _remove(index: dict[tuple[str, str], dict[Branch, None]], key: tuple[str, str], branch: Branch) -> None:
    """Remove a branch from what an index has under a key, and the key with its last branch."""
    branches = index[key]
    del branches[branch]
    if not branches:
        del index[key]
