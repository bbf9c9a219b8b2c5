"""Bugs to plant around forks: errors in shared chunks, in branches and in their index. See `mutations`."""

from __future__ import annotations

from pensieve_jax.cache import CachedSequence, CacheManager, EvictionClass, Role
from pensieve_jax.cache.chunk_store import ChunkStore
from pensieve_jax.cache.trunks import SharedChunks
from pensieve_jax.engine import branches, chunk_index
from pensieve_jax.engine.branches import BranchTable
from pensieve_jax.engine.chunk_index import ChunkIndex
from pensieve_jax.engine.live import TurnEnd
from tests.engine.mutations import Mutation, by_name


def a_fork_takes_the_chunk_in_progress(patch):
    """Share the last chunk although it is only partly computed."""
    fork = CacheManager.fork

    def forked(self, source, num_tokens, sequence_id):
        size = self.chunk_tokens
        return fork(self, source, -(-num_tokens // size) * size, sequence_id)

    patch.setattr(CacheManager, "fork", forked)
    at = SharedChunks.trunk_at

    def found(self, sequence, num_chunks):
        rest = sequence.num_kv_tokens % self._chunk_tokens
        if (
            num_chunks
            and rest
            and num_chunks == len(sequence.chunks) - 1
            and num_chunks + 1 > sequence.num_shared
        ):
            return at(self, sequence, num_chunks + 1)
        return at(self, sequence, num_chunks)

    patch.setattr(SharedChunks, "trunk_at", found)


def copies_in_flight_stay_with_the_giver(patch):
    hand_over = ChunkStore.hand_over

    def handed(self, giver, taker, first, end):
        flights = dict(self._flights)
        hand_over(self, giver, taker, first, end)
        self._flights.update(flights)

    patch.setattr(ChunkStore, "hand_over", handed)


def counts_stay_with_the_giver(patch):
    hand_over = ChunkStore.hand_over

    def handed(self, giver, taker, first, end):
        before = giver.num_by_class.copy(), taker.num_by_class.copy()
        hand_over(self, giver, taker, first, end)
        giver.num_by_class[:], taker.num_by_class[:] = before

    patch.setattr(ChunkStore, "hand_over", handed)


def a_new_trunk_is_not_pinned(patch):
    split = SharedChunks._split

    def made(self, owner, num_chunks):
        trunk = split(self, owner, num_chunks)
        if trunk.role is Role.RUNNING and not any(
            c.eviction_class is EvictionClass.ABSENT for c in trunk.chunks
        ):
            self._store.set_role(trunk, Role.IDLE)
        return trunk

    patch.setattr(SharedChunks, "_split", made)


def only_the_nearest_trunk_is_pinned(patch):
    def pin(self, sequence):
        trunk = sequence.trunk
        if trunk is not None:
            trunk.num_running_users += 1
            if trunk.role is not Role.RUNNING:
                self._store.set_role(trunk, Role.RUNNING)

    patch.setattr(SharedChunks, "pin", pin)


def a_trunk_is_unpinned_with_the_first_that_stops(patch):
    def unpin(self, trunk):
        while trunk is not None and trunk.role is Role.RUNNING:
            trunk.num_running_users -= 1
            self._store.cancel_reserved(trunk)
            self._store.set_role(trunk, Role.IDLE)
            trunk = trunk.trunk

    patch.setattr(SharedChunks, "_unpin_from", unpin)


def a_trunk_outlives_its_users(patch):
    patch.setattr(SharedChunks, "_clean_up_from", lambda self, trunk: None)


def trunks_are_never_merged(patch):
    patch.setattr(SharedChunks, "merge_idle", lambda self, sequence: None)


def a_merged_tail_is_not_trimmed(patch):
    merge, trim = SharedChunks._merge, ChunkStore.trim

    def merged(self, trunk, sequence):
        patch.setattr(ChunkStore, "trim", lambda self, sequence: None)
        merge(self, trunk, sequence)
        patch.setattr(ChunkStore, "trim", trim)

    patch.setattr(SharedChunks, "_merge", merged)


def victims_are_looked_for_before_the_fork(patch):
    """Keep the search position for evictable chunks from before the fork."""
    give_to = CachedSequence.give_to

    def given(self, trunk, num_chunks):
        first_of = list(self._first_of)
        give_to(self, trunk, num_chunks)
        self._first_of = first_of

    patch.setattr(CachedSequence, "give_to", given)


def chunks_that_come_back_are_not_looked_for(patch):
    def take_from(self, trunk):
        self.trunk, self.num_shared = trunk.trunk, trunk.num_shared

    patch.setattr(CachedSequence, "take_from", take_from)


def arriving_chunks_of_far_trunks_are_read(patch):
    def first_arriving(self):
        for own in list(self.lineage())[1::-1]:
            if own.num_by_class[EvictionClass.ARRIVING]:
                return own.first_of(EvictionClass.ARRIVING)
        return None

    patch.setattr(CachedSequence, "first_arriving", property(first_arriving))


def departing_chunks_of_trunks_are_admitted(patch):
    def is_departing(self, sequence):
        return sequence.num_by_class[EvictionClass.DEPARTING] > 0

    patch.setattr(CacheManager, "is_departing", is_departing)


def a_cut_loses_its_place(patch):
    """Keep one chunk too many when a sequence is cut inside a trunk."""
    cut = SharedChunks.cut

    def kept(self, sequence, num_chunks):
        cut(self, sequence, min(num_chunks + 1, sequence.num_shared - 1))

    patch.setattr(SharedChunks, "cut", kept)


def room_counts_what_a_request_begins_with(patch):
    num_available = CacheManager._num_available

    def counted(self, requester, arrival):
        trunk, requester.trunk = requester.trunk, None
        try:
            return num_available(self, requester, arrival)
        finally:
            requester.trunk = trunk

    patch.setattr(CacheManager, "_num_available", counted)


def a_laid_out_tail_counts_as_computed(patch):
    """Count the partly computed chunk as a full one."""
    prepare_fork = CacheManager.prepare_fork

    def laid(self, sequence, num_tokens):
        num_chunks = num_tokens // self.chunk_tokens
        if num_chunks > sequence.num_kv_tokens // self.chunk_tokens:
            self._store.extend(sequence, num_chunks)
            sequence.num_kv_tokens = num_chunks * self.chunk_tokens
            self._trunks.trunk_at(sequence, num_chunks)
        else:
            prepare_fork(self, sequence, num_tokens)

    patch.setattr(CacheManager, "prepare_fork", laid)


def a_turn_behind_an_earlier_one_extends(patch):
    """Take the branch although its tip is another turn."""
    begin = BranchTable._begin

    def begun(self, node, place, prompt, twin, *rest):
        if place.branch is not None and not place.branch.busy and twin is None:
            branch, origin = place.branch, begin(self, node, place, prompt, twin, *rest)[1]
            return branch, origin
        return begin(self, node, place, prompt, twin, *rest)

    patch.setattr(BranchTable, "_begin", begun)


def a_busy_branch_is_extended(patch):
    begin = BranchTable._begin

    def begun(self, node, place, prompt, twin, *rest):
        if place.branch is None or not place.branch.busy or twin is not None:
            return begin(self, node, place, prompt, twin, *rest)
        place.branch.busy = False
        return begin(self, node, place, prompt, twin, *rest)

    patch.setattr(BranchTable, "_begin", begun)


def turns_end_a_token_early(patch):
    """Begin a fork with one token less than its parent has."""
    settled = BranchTable.settled

    def short(self, branch, node, *rest):
        settled(self, branch, node, *rest)
        end = branch.path[node.turn_id]
        branch.path[node.turn_id] = TurnEnd(end.num_shared - 1, end.durable)

    patch.setattr(BranchTable, "settled", short)


def _find_without_looking(self, owner, tokens):
    """Find a match as `ChunkIndex.longest`, but without comparing tokens."""
    best, num_tokens = None, 0
    for chunk_hash in chunk_index._chain(chunk_index._salt(owner), tokens, self._chunk_tokens):
        if chunk_hash not in self._by_hash:
            break
        who, num_tokens = self._by_hash[chunk_hash], num_tokens + self._chunk_tokens
        best = (next(iter(who)) if isinstance(who, dict) else who), num_tokens
    return best


def owners_share_chunks(patch):
    patch.setattr(chunk_index, "_salt", lambda owner: 0)
    patch.setattr(ChunkIndex, "longest", _find_without_looking)


def hashes_are_not_chained(patch):
    patch.setattr(chunk_index, "_chained", lambda before, chunk: hash(chunk) & (2**64 - 1))
    patch.setattr(ChunkIndex, "longest", _find_without_looking)


def branches_stay_in_the_index(patch):
    patch.setattr(ChunkIndex, "leave", lambda self, conversation: None)


def all_of_a_context_is_found(patch):
    patch.setattr(BranchTable, "longest", lambda self, owner, context: self._chunks.longest(owner, context))


def what_is_in_memory_only_has_durable_turns(patch):
    settled = BranchTable.settled

    def durable(self, branch, node, *rest):
        settled(self, branch, node, *rest)
        branch.path[node.turn_id] = branch.path[node.turn_id]._replace(durable=not node.durable)

    patch.setattr(BranchTable, "settled", durable)


def forks_share_what_the_source_replaces(patch):
    """Let a fork share tokens of its source that a later turn on the source has replaced."""
    behind = BranchTable._behind

    def shared(self, *parent):
        place = behind(self, *parent)
        return place._replace(num_shared=len(place.token_ids) if place.branch else 0)

    patch.setattr(BranchTable, "_behind", shared)


def replaced_tokens_stay_on_the_path(patch):
    patch.setattr(branches, "replace_tokens", lambda path, keep, replaced: None)


FORK_MUTATIONS: dict[str, Mutation] = by_name(
    a_fork_takes_the_chunk_in_progress,
    copies_in_flight_stay_with_the_giver,
    counts_stay_with_the_giver,
    a_new_trunk_is_not_pinned,
    only_the_nearest_trunk_is_pinned,
    a_trunk_is_unpinned_with_the_first_that_stops,
    a_trunk_outlives_its_users,
    trunks_are_never_merged,
    a_merged_tail_is_not_trimmed,
    victims_are_looked_for_before_the_fork,
    chunks_that_come_back_are_not_looked_for,
    arriving_chunks_of_far_trunks_are_read,
    departing_chunks_of_trunks_are_admitted,
    a_cut_loses_its_place,
    room_counts_what_a_request_begins_with,
    a_laid_out_tail_counts_as_computed,
    a_turn_behind_an_earlier_one_extends,
    a_busy_branch_is_extended,
    turns_end_a_token_early,
    owners_share_chunks,
    hashes_are_not_chained,
    branches_stay_in_the_index,
    all_of_a_context_is_found,
    what_is_in_memory_only_has_durable_turns,
    forks_share_what_the_source_replaces,
    replaced_tokens_stay_on_the_path,
)
