"""Starts, ends and reports of copies, computed by hand: a chunk takes 1 s, the latency is a quarter."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from lab.tests.simulator.workloads import PROFILE
from pensieve_jax import CacheConfig, EngineConfig
from pensieve_jax.cache import AnalyticCostModel, ChunkCopy
from pensieve_jax.engine import transfers
from pensieve_lab.simulator import DeviceProfile, Replica
from pensieve_lab.simulator.clock import Timeline
from pensieve_lab.simulator.device import SimulatedDevice
from pensieve_lab.simulator.profile import HostCosts, LinkCosts, StepCosts
from pensieve_lab.simulator.step_time import StepLoad
from pensieve_lab.simulator.transfers import SimulatedTransfers

LINK = LinkCosts(bytes_per_s=8.0, latency_s=0.25)
STEP = StepCosts(
    weight_read_s=10.0, token_s=0, hot_share=0, hot_s=0, overlap=1, kv_read_s=0, pair_s=0, span_s=0,
    step_s=0, padded_token_s=0,
)  # fmt: skip
HOST = HostCosts(step_s=1.0, row_s=0, turn_s=0, chunk_s=0, launch_s=0, launch_beside_copies_s=0)
SLOW = dataclasses.replace(
    PROFILE, to_device=LINK, to_host=LINK, both_ways_share=0.5, page_copy_byte_s=0.0,
    hosts={"jaxlib": HOST, "engine": HOST}, fetch_s=0.5, step=STEP,
)  # fmt: skip


class Machine:
    """Transfers, a device whose steps take 10 s, and a host that takes 1 s per step."""

    def __init__(
        self,
        *,
        max_num_staged: int = 4,
        retrieval_priority: bool = True,
        num_devices: int = 1,
        profile: DeviceProfile = SLOW,
    ) -> None:
        self.timeline = Timeline()
        self.transfers = SimulatedTransfers(
            dataclasses.replace(profile, num_devices=num_devices),
            self.timeline,
            chunk_bytes=8,
            max_num_staged=max_num_staged,
            retrieval_priority=retrieval_priority,
        )
        self.device = SimulatedDevice(profile, (16,), self.timeline, self.transfers)

    def swap_out(self, out: list[ChunkCopy]) -> None:
        """Swap out, then swap in nothing, as every step does both."""
        self.transfers.swap_out(out)
        self.transfers.swap_in([])

    def dispatch(self, num_rows: int = 1) -> float:
        load = StepLoad()
        for _ in range(num_rows):
            load.add(1, 1)
        return self.device.dispatch(load)


def costs(launches: str = "jaxlib", **values: float) -> DeviceProfile:
    """Make a profile whose host takes a second per step, with the given values."""
    host = dataclasses.replace(HOST, **values)
    return dataclasses.replace(SLOW, hosts={"jaxlib": host, "engine": host}, launches=launches)


def copies(*copy_ids: int) -> list[ChunkCopy]:
    return [ChunkCopy(copy_id, copy_id, copy_id) for copy_id in copy_ids]


def test_steps_follow_each_other_and_the_host_is_hidden():
    machine = Machine()
    assert machine.dispatch() == 11
    assert machine.dispatch() == 21 and machine.timeline.now() == 2
    machine.device.fetch(11)
    assert machine.timeline.now() == 11.5
    machine.device.fetch(1)
    assert machine.timeline.now() == 11.5
    assert machine.device.busy_s == 20 and machine.device.num_padded_tokens == 30
    assert machine.device.padding_s == 0, "tokens take no time on this device"


def test_the_host_takes_what_rows_turns_and_chunks_ask_for():
    machine = Machine(profile=costs(row_s=0.25, turn_s=2.0, chunk_s=0.5))
    machine.device.submit()
    machine.device.submit()
    machine.transfers.swap_out(copies(1, 2))
    machine.transfers.swap_in(copies(3))
    assert machine.dispatch(num_rows=4) == 1 + 4 * 0.25 + 2 * 2 + 3 * 0.5 + 10
    begun_s = machine.timeline.now()
    machine.dispatch()
    assert machine.timeline.now() == begun_s + 1.25, "each is paid for once"
    assert machine.device.host_s == machine.timeline.now()


def test_a_device_that_waits_begins_with_the_first_kernel_and_ends_after_the_last():
    """This holds for either launching thread; the engine's thread can do nothing else meanwhile."""
    for launches, busy_s in (("jaxlib", 1.0), ("engine", 5.0)):
        machine = Machine(profile=costs(launches, launch_s=4.0))
        assert machine.dispatch() == 11.0 and machine.timeline.now() == busy_s
        assert machine.device.host_s == busy_s
        machine = Machine(profile=costs(launches, launch_s=14.0))
        assert machine.dispatch() == 15.0, "kernels are computed as they are launched"


def test_launches_take_longer_beside_copies():
    machine = Machine(profile=costs("engine", launch_s=1.0, launch_beside_copies_s=3.0))
    machine.dispatch()
    assert machine.timeline.now() == 2.0
    machine.swap_out(copies(1))  # from 11.25 on
    machine.dispatch()
    assert machine.timeline.now() == 2.0 + 1.0 + 3.0
    machine.timeline.advance_to(30.0)
    machine.dispatch()
    assert machine.timeline.now() == 32.0


def test_products_take_longer_on_a_device_that_is_hot_from_them():
    """A fifth longer in the long run; the time constant is the time of three steps."""
    step = dataclasses.replace(STEP, weight_read_s=0.0, token_s=1.0, hot_share=0.2, hot_s=30.0)
    machine = Machine(profile=dataclasses.replace(SLOW, step=step))
    ends = [machine.dispatch() for _ in range(40)]
    seconds = [end - begin for begin, end in itertools.pairwise(ends)]
    assert seconds == sorted(seconds) and 16.0 < seconds[0] < 18.5 and seconds[-1] == pytest.approx(19.2)
    machine.timeline.advance_to(ends[-1] + 300.0)
    rested_s = machine.dispatch() - machine.timeline.now()
    assert rested_s < seconds[0], "it cools while it has nothing to do"


def test_a_host_that_is_late_makes_the_device_wait_and_the_step_before_look_long():
    machine = Machine(profile=costs(turn_s=20.0))
    first = machine.dispatch()
    machine.device.submit()
    assert machine.dispatch() == 32.0, "21 s of the host from second 1 on, then the step"
    machine.device.fetch(first)
    assert machine.device.steps.totals[16] == (1, 21.0, 1), "10 s of it the device's, but it was fetched late"


def test_gathers_and_scatters_take_their_turn_among_the_steps():
    """Chunks have 8 bytes, and the device takes an eighth of a second per byte."""
    machine = Machine(profile=dataclasses.replace(SLOW, page_copy_byte_s=0.125))
    machine.swap_out(copies(1, 2))
    assert machine.dispatch() == 2.0 + 10.0, "two gathers from second 0 on, the launch at second 1"
    machine.transfers.swap_in(copies(3))
    assert machine.dispatch() == 22.0
    assert machine.transfers.completed().arrived == [3]
    assert machine.dispatch() == 33.0, "a scatter first"


def test_a_copy_to_the_host_is_named_when_it_has_ended_in_order():
    machine = Machine()
    machine.swap_out(copies(1, 2))
    assert machine.transfers.completed().arrived == []
    machine.timeline.advance_to(1.25)
    assert machine.transfers.completed().arrived == [1]
    machine.timeline.advance_to(9)
    assert machine.transfers.completed().arrived == [2] and machine.transfers.completed().arrived == []


def test_a_copy_waits_for_what_was_dispatched_before():
    machine = Machine()
    machine.dispatch()  # until 11
    machine.swap_out(copies(1))
    machine.timeline.advance_to(12.2)
    assert machine.transfers.completed().arrived == []
    machine.timeline.advance_to(12.25)
    assert machine.transfers.completed().arrived == [1]


def test_a_copy_to_the_device_is_named_a_step_later_and_awaited_by_the_one_after():
    machine = Machine()
    machine.transfers.swap_in(copies(*range(1, 13)))
    machine.timeline.advance_to(50)
    assert machine.transfers.completed().arrived == []  # nothing was dispatched that they could start beside
    assert machine.dispatch() == 61  # four start, from 50.25 to 54.25
    assert machine.transfers.completed().arrived == [1, 2, 3, 4]
    assert machine.dispatch() == 71  # the next four, behind that step: 61.25 to 65.25
    assert machine.transfers.completed().arrived == [5, 6, 7, 8]
    assert machine.dispatch() == 81


def test_a_step_waits_for_the_rest_of_a_copy():
    machine = Machine(max_num_staged=20)
    machine.transfers.swap_in(copies(*range(1, 16)))
    assert machine.dispatch() == 11  # beside copies that end at 15.25
    assert len(machine.transfers.completed().arrived) == 15
    assert machine.dispatch() == 25.25


def test_what_starts_beside_a_step_is_bounded_by_its_bytes(monkeypatch):
    monkeypatch.setattr(transfers, "_BYTES_BESIDE_STEP", 25)
    machine = Machine()
    machine.transfers.swap_in(copies(*range(1, 6)))
    assert machine.dispatch() == 11
    assert machine.transfers.completed().arrived == [1, 2, 3]
    assert machine.dispatch() == 21
    assert machine.transfers.completed().arrived == [4, 5]


def test_several_devices_are_bounded_by_a_devices_share(monkeypatch):
    """Chunks of 8 bytes, 4 of them on each device: 25 bytes beside a step are six chunks."""
    monkeypatch.setattr(transfers, "_BYTES_BESIDE_STEP", 25)
    machine = Machine(max_num_staged=20, num_devices=2)
    machine.transfers.swap_in(copies(*range(1, 11)))
    machine.dispatch()
    assert machine.transfers.completed().arrived == [1, 2, 3, 4, 5, 6]


def test_several_devices_stage_by_a_devices_share():
    """One device stages 64 chunks of 26 MB, the minimum; four devices have 6.6 MB of each, and stage 128."""
    large = dataclasses.replace(PROFILE, kv_token_bytes=819_200)
    config = EngineConfig(cache=CacheConfig(gpu_pages=100, cpu_pages=100))
    costs = AnalyticCostModel(32, num_weights=1e3, attention_width=1e3)
    for num_devices, num_staged in ((1, 64), (4, 128)):
        replica = Replica(config, dataclasses.replace(large, num_devices=num_devices), costs)
        assert replica._transfers._max_num_staged == replica.cache._max_num_copies == num_staged


def test_packed_chunks_take_less_of_the_link_and_as_much_of_the_device():
    """Three quarters of 32 tokens' bytes travel; gathers read all of them."""
    profile = dataclasses.replace(PROFILE, page_copy_byte_s=1.0)
    packed = dataclasses.replace(profile, host_share=0.75)
    assert packed.host_chunk_bytes(32) == 24 * profile.kv_token_bytes
    config = EngineConfig(cache=CacheConfig(gpu_pages=100, cpu_pages=100))
    costs = AnalyticCostModel(32, num_weights=1e3, attention_width=1e3)
    of_raw, of_packed = (Replica(config, one, costs)._transfers for one in (profile, packed))
    assert of_packed._page_copy_s == of_raw._page_copy_s > 0
    assert of_packed._out._chunk_s == pytest.approx(0.75 * of_raw._out._chunk_s)
    assert of_packed._chunk_bytes == 24 * profile.kv_token_bytes


def test_expedited_copies_hold_the_very_next_step():
    machine = Machine()
    machine.transfers.swap_in(copies(1, 2, 3))
    machine.transfers.expedite([1, 2, 3])
    assert machine.dispatch() == 13.25  # at 3.25, not at 1
    assert machine.transfers.completed().arrived == []
    assert machine.transfers.stats()["swapped_in_bytes"] == 24


def test_expediting_what_has_started_already():
    machine = Machine()
    machine.transfers.swap_in(copies(1, 2))
    machine.dispatch()
    machine.transfers.swap_in(copies(3))
    machine.transfers.expedite([2, 3])
    assert machine.dispatch() == 12.25 + 10  # copy 3 begins at 11
    assert machine.transfers.completed().arrived == [1]
    with pytest.raises(AssertionError, match="not in flight"):
        machine.transfers.expedite([2])


def test_swapping_out_blocks_while_staging_is_full():
    machine = Machine()
    machine.swap_out(copies(1, 2, 3))
    machine.swap_out(copies(4, 5))  # room for two when the first has ended
    assert machine.timeline.now() == 1.25
    machine.swap_out(copies(6, 7, 8, 9))  # by windows of two
    assert machine.timeline.now() == 5.25
    assert machine.transfers.stats()["transfer_stall_s"] == 5.25
    assert machine.transfers.completed().arrived == [1, 2, 3, 4, 5]


def test_both_directions_at_once_share():
    machine = Machine(retrieval_priority=False)
    machine.transfers.swap_in(copies(1, 2, 3))
    machine.dispatch()  # copies in from 0 to 3.25, the step until 11
    machine.timeline.device_free_s = 0.0
    machine.swap_out(copies(4, 5, 6))  # from 1 on, at half the speed until 3.25
    machine.timeline.advance_to(4.25)
    assert machine.transfers.completed().arrived == [4, 5, 1, 2, 3]  # 3.25, 4.25, with the step
    machine.timeline.advance_to(5.25)
    assert machine.transfers.completed().arrived == [6]


def test_copies_to_the_device_go_first_for_some_steps():
    machine = Machine()
    machine.transfers.swap_in(copies(1))
    machine.swap_out(copies(2))  # held back
    machine.timeline.advance_to(5)
    assert machine.transfers.completed().arrived == []
    machine.dispatch()
    machine.transfers.completed()
    machine.swap_out(copies())  # copy 1 has been named, but is on the link until 6.25
    machine.timeline.advance_to(30)
    assert machine.transfers.completed().arrived == []
    machine.swap_out(copies())  # now it starts
    machine.timeline.advance_to(31.25)
    assert machine.transfers.completed().arrived == [2]


def test_copies_to_the_device_of_the_same_pass_go_first():
    machine = Machine()
    machine.transfers.swap_out(copies(1))
    machine.transfers.swap_in(copies(2))
    machine.timeline.advance_to(5)
    assert machine.transfers.completed().arrived == []


def test_no_copy_is_held_back_forever():
    machine = Machine(max_num_staged=16)
    machine.swap_out(copies(99))  # starts at once
    machine.transfers.swap_in(copies(1))
    machine.swap_out(copies(2))
    for step in range(5):
        machine.timeline.advance_to(20 * step)
        machine.transfers.swap_in(copies(3 + step))
        machine.swap_out(copies())
        machine.dispatch()
        machine.transfers.completed()
    machine.timeline.advance_to(200)
    assert machine.transfers.completed().arrived[:1] == [2]


def test_waiting_moves_the_clock_to_the_end_of_a_window():
    machine = Machine()
    machine.transfers.swap_in(copies(1, 2, 3, 4, 5))
    machine.transfers.wait()
    assert machine.timeline.now() == 2.25
    assert machine.transfers.completed().arrived == [1, 2]
    machine.transfers.wait()
    assert machine.timeline.now() == 4.25 and machine.transfers.completed().arrived == [3, 4]
    machine.transfers.wait()
    assert machine.transfers.completed().arrived == [5]
    with pytest.raises(AssertionError, match="nothing in flight"):
        machine.transfers.wait()
