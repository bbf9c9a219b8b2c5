"""Chunks copied to pinned memory and back: contents, order with the steps, limits, failures."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_defs import make_mesh
from pensieve_jax.core.errors import StepFailedError
from pensieve_jax.device.kv_storage import DevicePools, KVStorage, chunk_bytes, slot_bytes
from pensieve_jax.device.transfers import copy_batches, in_flight
from pensieve_jax.device.transfers.copy_batches import copy_arrays
from pensieve_jax.device.transfers.device_transfers import DeviceTransfers
from pensieve_jax.device.transfers.in_flight import InFlight
from pensieve_jax.engine.transfers import num_beside_step, window
from tests.device.transfers.transfer_bench import CACHE, MODEL, Bench, failing

BFLOAT16 = jnp.dtype("bfloat16")


@pytest.fixture
def never_ready(monkeypatch):
    monkeypatch.setattr(InFlight, "is_ready", lambda self: False)


SHORT = [("float32", 1, 3), ("float32", 2, 2), ("bfloat16", 1, 2), ("bfloat16", 2, 3), ("packed", 2, 1)]
ALL = list(itertools.product(["float32", "bfloat16", "packed"], [1, 2], [1, 2, 3]))


def bench_of(stored, *rest):
    """Return a bench with the KV cache in a dtype, or "packed", from bfloat16."""
    is_packed = stored == "packed"
    return Bench(rest[0], "bfloat16" if is_packed else stored, *rest[1:], pack_host=is_packed)


@pytest.mark.parametrize(
    ("stored", "num_devices", "num_groups"),
    [*SHORT, *(pytest.param(*one, marks=pytest.mark.long) for one in ALL if one not in SHORT)],
)
def test_a_round_trip_keeps_the_contents(stored, num_devices, num_groups):
    """Chunks return to other pages, in batches of every size, and nothing is compiled for that."""
    bench = bench_of(stored, num_devices, num_groups)
    origin = {}
    for num_chunks in (1, 4, 5, 13, 19):
        pages = [page + num_chunks for page in range(1, num_chunks + 1)]
        bench.store(zip(pages, range(1, num_chunks + 1), strict=True))
        expected = [origin.get(page, page) for page in pages]
        bench.step(pages)
        back = bench.copies((page, slot) for slot, page in enumerate(range(num_chunks, 0, -1), start=1))
        bench.transfers.swap_in(back)
        bench.step()
        assert sorted(bench.transfers.completed().arrived) == [copy.copy_id for copy in back]
        origin |= {page: None for page in pages} | dict(zip(range(num_chunks, 0, -1), expected, strict=True))
        bench.check(origin)
    for arrays in (bench.transfers._host.get(1), bench.transfers._host.get(19)):
        assert [len(array) for array in arrays] == [len(layers) for layers in bench.storage.groups]
        for array in arrays:
            assert array.sharding.memory_kind == "pinned_host"
            assert array.addressable_shards[0].data.shape[2] == 2 * MODEL.num_kv_heads // num_devices
    assert bench.counter.value == 0


def test_a_page_may_be_written_right_after():
    """The step dispatched next destroys the pages; the slots hold what was there before."""
    bench = Bench()
    out = bench.copies([(5, 1), (6, 2)])
    bench.transfers.swap_out(out)
    bench.step([5, 6])
    bench.finish(out)
    back = bench.copies([(6, 1), (7, 2)])
    bench.transfers.swap_in(back)
    bench.finish(back)
    bench.check({5: None, 6: 5, 7: 6})


def test_a_copy_takes_effect_with_the_step_after(never_ready):
    """The step beside it leaves the page alone; then it is reported, ready or not."""
    bench = Bench()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InFlight, "is_ready", lambda self: bool(self.target))
        bench.store([(5, 1)])
    (back,) = bench.copies([(7, 1)])
    bench.transfers.swap_in([back])
    assert not bench.transfers.completed().arrived and not bench.transfers.completed().arrived
    bench.check({})
    bench.step()
    bench.check({})
    assert bench.transfers.completed().arrived == [back.copy_id]
    bench.check({7: 5})
    assert not bench.transfers.completed().arrived


def test_without_a_step_a_copy_is_reported_when_it_has_ended():
    bench = Bench()
    bench.store([(5, 1)])
    (back,) = bench.copies([(7, 1)])
    bench.transfers.swap_in([back])
    bench.transfers.wait()
    assert bench.transfers.completed().arrived == [back.copy_id]
    bench.check({7: 5})


@pytest.mark.parametrize("is_earlier", [False, True])
def test_expedited_copies_land_group_by_group(never_ready, is_earlier):
    """They land in the next step, each before its group's program, unready, and are never reported."""
    bench = Bench()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InFlight, "is_ready", lambda self: bool(self.target))
        bench.store([(5, 1), (6, 2)])
    expedited, calm = bench.copies([(7, 1), (8, 2)])
    bench.transfers.swap_in([expedited, calm])
    if is_earlier:
        bench.transfers.start()
        assert not bench.transfers.completed().arrived
    bench.transfers.expedite([expedited.copy_id])
    assert bench.storage.groups == (range(0, 1), range(1, 3))
    np.testing.assert_array_equal(bench.page(7), bench.content[7])
    bench.transfers.start()
    bench.transfers.land(0)
    np.testing.assert_array_equal(bench.page(7), np.concatenate([bench.content[5, :1], bench.content[7, 1:]]))
    bench.transfers.land(1)
    bench.check({7: 5})
    assert bench.transfers.completed().arrived == [calm.copy_id]
    bench.check({7: 5, 8: 6})


def test_copies_beyond_staging_wait_their_turn(never_ready):
    """Each step starts as many as the limit, in order."""
    bench = Bench(bound=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InFlight, "is_ready", lambda self: bool(self.target))
        bench.store([(page, page) for page in range(1, 11)])
    back = bench.copies((page + 20, page) for page in range(1, 11))
    ids = [copy.copy_id for copy in back]
    bench.transfers.swap_in(back)
    named = []
    for num_named in (0, 4, 8, 10):
        named += bench.transfers.completed().arrived
        assert named == ids[:num_named]
        bench.check({copy.page: copy.slot for copy in back[:num_named]})
        bench.step()
        assert bench.transfers.stats()["num_swap_in_copies"] == 2 * min(num_named + 4, 10)


def test_copies_beside_a_step_are_limited_by_bytes(never_ready, monkeypatch):
    """Two chunks per step, however many could be staged; expedited ones are extra."""
    bench = Bench(bound=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InFlight, "is_ready", lambda self: bool(self.target))
        bench.store([(page, page) for page in range(1, 7)])
    monkeypatch.setattr(bench.transfers._incoming, "_num_beside_step", 2)
    back = bench.copies((page + 20, page) for page in range(1, 7))
    bench.transfers.swap_in(back)
    bench.step()
    assert bench.transfers.completed().arrived == [copy.copy_id for copy in back[:2]]
    bench.transfers.expedite([copy.copy_id for copy in back[2:4]])
    bench.step()
    assert bench.transfers.completed().arrived == [copy.copy_id for copy in back[4:]]
    bench.check({page + 20: page for page in range(1, 7)})


@pytest.mark.parametrize(
    ("max_num_staged", "chunk_bytes", "number"),
    [(128, 6_553_600, 64), (64, 26_214_400, 16), (20, 1, 20), (9, 10**9, 1)],
)
def test_chunks_beside_a_step(max_num_staged, chunk_bytes, number):
    """Covers the 13B presets, tiny ones, and a chunk larger than the limit."""
    assert num_beside_step(max_num_staged, chunk_bytes) == number


def test_full_staging_blocks():
    """Ten chunks through room for four: the stall is counted, and none is lost."""
    bench = Bench(bound=4)
    out = bench.copies((page, page) for page in range(1, 11))
    bench.transfers.swap_out(out)
    assert len(bench.transfers._outgoing.in_flight) <= 4
    stats = bench.transfers.stats()
    assert stats["transfer_stall_s"] > 0 and stats["num_swap_out_copies"] == 2 * 8  # two may be held back
    bench.step(range(1, 11))
    bench.finish(out)
    back = bench.copies((page + 20, page) for page in range(1, 11))
    bench.transfers.swap_in(back)
    bench.finish(back)
    bench.check({page: None for page in range(1, 11)} | {page + 20: page for page in range(1, 11)})


@pytest.fixture
def one_by_one(monkeypatch):
    """Let copies end only during a wait, one at a time from the last one checked."""
    ended, looked_at = [], []

    def is_ready(transfer):
        if any(transfer.target is target for target in ended):
            return True
        looked_at.append(transfer.target)
        return False

    monkeypatch.setattr(InFlight, "is_ready", is_ready)
    monkeypatch.setattr(in_flight, "_sleep", lambda _: ended.append(looked_at.pop()))
    return ended


def test_staging_is_left_and_filled_by_windows(one_by_one, monkeypatch):
    """Copies beyond the room go in windows, so that the first start at once."""
    bench, gathered = Bench(bound=6), []
    one_by_one.clear()
    gather = bench.transfers._copies.gather
    monkeypatch.setattr(
        bench.transfers._copies, "gather", lambda pages: (gathered.append(len(pages)), gather(pages))[1]
    )
    bench.transfers.swap_out(bench.copies((page, page) for page in range(1, 15)))
    assert gathered == [3, 3, 3, 3, 2]
    assert len(bench.transfers._outgoing.in_flight) == 6
    assert bench.transfers.stats()["num_swap_out_copies"] == 2 * 12  # copies whose room is not needed wait


def test_a_window_is_no_more_than_a_gather():
    """Staging has room for 128; if it is small, half of it."""
    assert [window(bound) for bound in (128, 64, 20, 5, 1)] == [16, 16, 10, 3, 1]


def test_waiting_without_a_started_copy_is_refused():
    """Such a wait would not end."""
    bench = Bench(bound=6)
    bench.transfers.swap_out(bench.copies([(5, 1)]))
    held = bench.transfers._outgoing.in_flight
    held[0].target.clear()
    with pytest.raises(AssertionError, match="endless wait"):
        bench.transfers._dispatcher.wait_for(held, 1)


def test_waiting_is_for_a_window(one_by_one):
    """Then all that have ended take effect together, regardless of earlier ones."""
    bench = Bench(bound=6)
    bench.store([(page, page) for page in range(1, 7)])
    one_by_one.clear()
    back = bench.copies((page + 20, page) for page in range(1, 7))
    bench.transfers.swap_in(back)
    bench.transfers.wait()
    assert bench.transfers.completed().arrived == [copy.copy_id for copy in back[3:]]
    one_by_one.append(bench.transfers._incoming.staged[0].target)
    assert bench.transfers.completed().arrived == [back[0].copy_id]
    assert len(bench.transfers._incoming.staged) == 2


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_expedited_copies_start_before_the_plan_and_the_first_group_by_itself(num_groups, monkeypatch):
    """On a GPU a copy waits for earlier dispatches: here for the first group's scatter."""
    bench = Bench(num_groups=num_groups)
    bench.store([(5, 1), (6, 2), (9, 3)])
    back = bench.copies([(7, 1), (8, 2), (10, 3)])
    calls = []
    dispatcher, copies = bench.transfers._dispatcher, bench.transfers._copies
    start, scatter = dispatcher.start, copies.scatter

    def noted_start(batch, sharding, groups):
        calls.append(("start", len(batch), groups))
        start(batch, sharding, groups)

    def noted_scatter(group, *rest):
        calls.append(("scatter", group))
        scatter(group, *rest)

    monkeypatch.setattr(dispatcher, "start", noted_start)
    monkeypatch.setattr(copies, "scatter", noted_scatter)
    bench.transfers.swap_in(back)
    bench.transfers.expedite([copy.copy_id for copy in back[:2]])
    assert calls == [("start", 2, range(1))]
    bench.transfers.start()
    others = [("start", 2, range(1, num_groups))] if num_groups > 1 else []
    assert calls[1:] == [("scatter", 0), *others, ("start", 1, range(num_groups))]
    for group in range(num_groups):
        bench.transfers.land(group)
    assert calls[-num_groups:][1:] == [("scatter", group) for group in range(1, num_groups)]
    bench.check({7: 5, 8: 6})
    assert bench.transfers.stats()["num_swap_in_copies"] == 3 * num_groups


def test_copies_start_behind_a_mark(monkeypatch):
    """The step's plan, which was sent before, thus arrives first; without copies there is no mark."""
    bench = Bench()
    bench.store([(5, 1), (6, 2)])
    calls = []
    barrier, dispatcher = bench.transfers._incoming.barrier, bench.transfers._dispatcher
    dispatch, start = barrier.dispatch, dispatcher.start
    monkeypatch.setattr(barrier, "dispatch", lambda: (calls.append("mark"), dispatch()))
    monkeypatch.setattr(
        dispatcher, "start", lambda *rest: (calls.extend(["start"] * bool(rest[0])), start(*rest))
    )
    bench.step()
    assert not calls
    bench.transfers.swap_in(bench.copies([(7, 1), (8, 2)]))
    assert not calls
    bench.step()
    assert calls == ["mark", "start"]
    bench.step()
    assert calls == ["mark", "start"] and bench.counter.value == 0


def test_the_mark_waits_for_earlier_transfers(monkeypatch):
    """It is computed from an array that goes to the device after everything sent before."""
    bench, seen = Bench(), []
    barrier = bench.transfers._incoming.barrier
    compiled = barrier._mark
    monkeypatch.setattr(barrier, "_mark", lambda sent: (seen.append(sent), compiled(sent))[1])
    barrier.dispatch()
    (sent,) = seen
    assert isinstance(sent, jax.Array) and not sent.is_deleted() and sent.sharding.is_fully_replicated


@pytest.mark.parametrize("priority", [True, False])
def test_retrieval_priority(never_ready, priority):
    """No copy out starts while a chunk is copied in, unless its room is needed."""
    bench = Bench(bound=4, priority=priority)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InFlight, "is_ready", lambda self: bool(self.target))
        bench.store([(5, 1)])
    (back,) = bench.copies([(7, 1)])
    bench.transfers.swap_out(bench.copies([(9, 2), (10, 3)]))  # the swap-in beside it goes first
    bench.transfers.swap_in([back])
    num_before, num_both = 2 * 1, 2 * 3
    started = bench.transfers.stats()["num_swap_out_copies"]
    assert started == (num_before if priority else num_both)
    bench.step()
    bench.transfers.completed()
    jax.block_until_ready(bench.transfers._incoming._last)
    bench.transfers.swap_out([])
    bench.transfers.swap_in([])
    assert bench.transfers.stats()["num_swap_out_copies"] == num_both


def test_held_back_copies_go_after_some_steps():
    """A caller may wait for them while others are fetched all the time."""
    bench = Bench(bound=4)
    bench.store([(5, 1)])
    for number in range(6):
        bench.transfers.swap_out([] if number else bench.copies([(20, 2)]))
        bench.transfers.swap_in(bench.copies([(7 + number, 1)]))
        started = bench.transfers.stats()["num_swap_out_copies"] - 2
        assert started == (0 if number < 4 else 2), number
        bench.step()
        bench.transfers.completed()


def test_held_back_copies_go_when_staging_is_full():
    bench = Bench(bound=4)
    bench.store([(5, 1)])
    bench.transfers.swap_in(bench.copies([(7, 1)]))
    for pairs in ([(8, 2), (9, 3), (10, 4)], [(11, 5), (12, 6)]):
        bench.transfers.swap_out(bench.copies(pairs))
    # the first, and those that made room
    assert bench.transfers.stats()["num_swap_out_copies"] == 2 * (1 + 3)


def test_reset_forgets_what_is_in_flight():
    """None is reported, its slots hold nothing; slots of completed copies stay valid."""
    bench = Bench(bound=4)
    bench.store([(page, page) for page in range(1, 8)])
    bench.transfers.swap_out(bench.copies([(30, 7), (31, 8)]))
    back = bench.copies((page + 20, page) for page in range(1, 7))
    bench.transfers.swap_in(back)
    bench.transfers.expedite([back[0].copy_id, back[1].copy_id])
    bench.transfers.start()
    bench.transfers.reset()
    bench.pools.reset()
    bench.step()
    assert not bench.transfers.completed().arrived
    assert not any(np.asarray(pool).any() for pool in bench.pools.by_layer)
    for slot in (7, 8):
        with pytest.raises(AssertionError, match=f"slot {slot} holds no chunk"):
            bench.transfers.swap_in(bench.copies([(1, slot)]))
    back = bench.copies((page + 10, page) for page in range(1, 7))
    bench.transfers.swap_in(back)
    bench.finish(back)
    for page in range(1, 7):
        np.testing.assert_array_equal(bench.page(page + 10), bench.content[page])
    assert bench.counter.value == 0


def test_a_slot_is_not_read_before_its_copy_has_ended():
    bench = Bench()
    out = bench.copies([(5, 1)])
    bench.transfers.swap_out(out)
    bench.step()
    with pytest.raises(AssertionError, match="slot 1 holds no chunk"):
        bench.transfers.swap_in(bench.copies([(7, 1)]))


@pytest.mark.parametrize("stored", ["bfloat16", "packed"])
def test_stats_count_chunks_of_all_devices(stored):
    """Packed chunks move 26 rows of bytes for 16 of two bytes."""
    bench = bench_of(stored, 2)
    bench.store([(5, 1), (6, 2), (7, 3)])
    back = bench.copies([(8, 1), (9, 2)])
    bench.transfers.swap_in(back)
    bench.finish(back)
    stats = bench.transfers.stats()
    page_bytes = 3 * 16 * 2 * 2 * 32 * 2
    num_bytes = page_bytes * 26 // 32 if stored == "packed" else page_bytes
    assert bench.storage.slot_bytes == 2 * bench.storage.staged_bytes == num_bytes
    assert slot_bytes(MODEL, dataclasses.replace(CACHE, pack_host=stored == "packed"), BFLOAT16) == num_bytes
    assert chunk_bytes(MODEL, 16, "bfloat16") == 2 * bench.storage.page_bytes == page_bytes
    num_padded = 7  # of 20 chunks staged: 9 in a batch of 16 leave 7 places empty
    assert bench.transfers.staging_bytes == (3 * 20 + num_padded) * num_bytes // 2
    assert (stats["swapped_out_bytes"], stats["swapped_in_bytes"]) == (3 * num_bytes, 2 * num_bytes)
    assert (stats["num_swap_out_copies"], stats["num_swap_in_copies"]) == (6, 4)
    assert stats["swap_dispatch_s"] > 0


def test_copies_that_fail_are_failed_steps(monkeypatch):
    """They may fail at the start, or at the end."""
    bench = Bench()
    bench.store([(5, 1)])
    with monkeypatch.context() as patch:
        patch.setattr(in_flight, "copy_arrays", failing)
        bench.transfers.swap_in(bench.copies([(7, 1)]))
        with pytest.raises(StepFailedError, match=r"could not be started.*RESOURCE_EXHAUSTED"):
            bench.transfers.start()
    bench.transfers.reset()
    (back,) = bench.copies([(7, 1)])
    bench.transfers.swap_in([back])
    with monkeypatch.context() as patch:
        patch.setattr(bench.transfers._copies, "stage", failing)
        with pytest.raises(StepFailedError, match=r"could not be started.*RESOURCE_EXHAUSTED"):
            bench.transfers.expedite([back.copy_id])
    bench.transfers.reset()
    bench.transfers.swap_in(bench.copies([(7, 1)]))
    bench.step()
    with monkeypatch.context() as patch:
        patch.setattr(bench.transfers._copies, "stage", failing)
        with pytest.raises(StepFailedError, match=r"could not be started.*RESOURCE_EXHAUSTED"):
            bench.transfers.completed()
    bench.transfers.reset()
    for call in (bench.transfers.swap_in, bench.transfers.swap_out):
        call(bench.copies([(7, 1)]))
        bench.transfers.start()
        jax.block_until_ready(
            [t.target for t in (*bench.transfers._incoming.staged, *bench.transfers._outgoing.in_flight)]
        )
        with monkeypatch.context() as patch:
            patch.setattr(jax, "block_until_ready", failing)
            bench.transfers.wait()
            with pytest.raises(StepFailedError, match=r"failed on the device.*RESOURCE_EXHAUSTED"):
                bench.transfers.completed()
        bench.transfers.reset()


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("has_batch_call", [True, False])
def test_a_batch_is_copied_as_device_put_copies_it(num_devices, has_batch_call, monkeypatch):
    if not has_batch_call:
        monkeypatch.setattr(copy_batches, "_copy_batch", None)
    storage = KVStorage(MODEL, CACHE, jnp.dtype("bfloat16"), make_mesh(num_devices))
    arrays = [jnp.full(storage.shape, i, jnp.bfloat16, device=storage.sharding) for i in range(3)]
    pinned = copy_arrays(arrays, storage.host_sharding)
    back = copy_arrays(pinned, storage.sharding)
    assert all(array.sharding == storage.host_sharding for array in pinned)
    assert all(array.sharding == storage.sharding for array in back)
    for i, array in enumerate(back):
        np.testing.assert_array_equal(np.asarray(array, np.float32), np.full(storage.shape, i))
    assert copy_arrays([], storage.sharding) == []


def test_without_slots_there_is_nothing_to_prepare():
    storage = KVStorage(MODEL, CACHE, jnp.dtype("float32"), make_mesh(1))
    transfers = DeviceTransfers(
        storage, DevicePools(storage), cpu_pages=0, max_num_staged_pages=4, retrieval_priority=True
    )
    assert (transfers.num_preparations, transfers.staging_bytes) == (0, 0)
    assert not list(transfers.grow()) and not list(transfers.jobs())
    transfers.rehearse()
    for call in (transfers.swap_out, transfers.swap_in, transfers.expedite):
        call([])
    transfers.start()
    transfers.land(0)
    assert not transfers.completed().arrived
