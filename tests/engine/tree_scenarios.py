"""Random scenarios of an engine whose turns are placed in trees, against the reference without pages.

    python -m tests.engine.tree_scenarios --num_scenarios=100000 --seed=0

Scenario i is `run_tree_scenario(seed + i)`, with `run_fork_scenario` of the same seed, which has no engine.
After every step it checks the integrity of cache, scheduler and branches. For every turn that ends it
compares the tokens with the reference, and the usage with what was really computed. At the end the history
has every durable turn, and every page and slot is free. Prints the range, a summary, and for every failure
its seed and its error; the exit status is 1 if there was one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import traceback
import weakref
from collections import Counter
from pathlib import Path

import pytest
from tqdm import tqdm

from pensieve_jax.cache import CachedSequence
from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.core.errors import (
    ContextLengthError,
    HistoryError,
    StepFailedError,
    UnknownTurnError,
)
from tests.cache.fork_scenarios import run_fork_scenario
from tests.cache.helpers import learned_state_of
from tests.engine.branch_checks import check_branches
from tests.engine.draft_oracle import plant_oracle
from tests.engine.harness import MAX_STEPS, Harness
from tests.engine.oracles import FakeBench
from tests.engine.outcomes import COUNTED
from tests.engine.scenarios import (
    FAILING_PLACES,
    INTERRUPTED_PLACES,
    RandomChooser,
    make_config,
    make_delays,
    tier_scenario,
    with_order,
    with_speculation,
)
from tests.engine.trees import Forest, Sent

MAX_TOKENS = 400  # per context
CALM = ("send", "send", "send", "step", "step", "step", "step", "cancel", "delete", "think", "look")
OPS = (*CALM * 3, "push_out", "forget_state", "sweep", "expire", "drop", "fail", "interrupt", "restart")


class TreeScenario:
    """One engine, its trees, and the operations on them.

    Attributes:
        totals: counts of what happened.
    """

    def __init__(
        self, seed: int, folder: Path | None, prompt_order: str = "arrival", *, drafts: bool = False
    ) -> None:
        self.choose = RandomChooser(seed)
        config = make_config(self.choose) if seed % 3 else tier_scenario(self.choose).config
        self.config = with_order(config, prompt_order)
        if drafts:
            self.config = with_speculation(self.config, seed)
        self.delays = make_delays(self.choose)
        self.path = None if folder is None else folder / "history.sqlite"
        self.clock = VirtualClock(1000.0)
        self.seed = seed
        self.running: list[Sent] = []
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.sent: dict[str, Sent] = {}  # by answered turn
        self.deleted: set[str] = set()  # turns whose response was deleted
        self.num_sent = 0
        self.totals: Counter[str] = Counter()
        self.open()

    def open(self) -> None:
        self.harness = Harness(
            self.config, path=self.path, clock=self.clock, max_model_tokens=MAX_TOKENS, delays=self.delays
        )
        self.engine = self.harness.engine
        self.trees = Forest(self.harness)
        self.trees.tokens = self.tokens
        if self.config.cache.policy == "learned":
            self.engine.cache.turns.begin(learned_state_of(self.seed))

    def run(self) -> None:
        ops = CALM if self.choose.pick((True, False)) else OPS
        for _ in range(self.choose.integer(20, 100)):
            getattr(self, f"_{self.choose.pick(ops)}")()
            self.check()
        self.drain()
        self._step_once()  # what was pushed out last leaves with it
        self.check_history()
        self.harness.forget_branches()
        self.harness.check_empty()
        for name in ("num_draft_steps", "num_accepted_draft_tokens"):
            self.totals[name] += self.engine.stats()[name]
        branches = self.engine.conversations.branches
        assert not len(branches._chunks) and not branches._by_turn and not branches._running
        self.engine.close()

    def check(self) -> None:
        self.engine.check_integrity()
        check_branches(self.engine.conversations, self.tokens)

    # Operations.

    def _send(self) -> None:
        choose = self.choose
        parent = choose.pick([None, *self.sent]) if choose.pick((True, True, False)) else None
        before = None if parent is None else self.sent[parent].node
        owner = choose.pick(("ann", "bob")) if before is None else before.owner
        durable = choose.pick((True, True, False)) and (before is None or before.durable)
        self.num_sent += 1
        more = {
            "seed": self.seed * 1000 + self.num_sent,
            "number": choose.pick((1, 1, 1, 2, 3)),
            "owner": owner,
            "durable": durable,
            "is_response": durable,
            "max_tokens": choose.pick((1, 4, 12, 40)),
            "temperature": choose.pick((0.0, 1.0)),
            "keep": None,
        }
        if parent is not None and choose.pick((True, False, False)):
            more["keep"] = choose.integer(0, len(self.tokens[parent]))
        prompt = self._prompt(parent, owner)
        try:
            sent = self.trees.send(parent, prompt, **more)
        except ContextLengthError:
            assert self.trees.facts(parent, prompt, max_tokens=4, keep=more["keep"]).max_output_len < 1
            return
        except UnknownTurnError:
            assert before is not None and not before.durable, "a durable turn was forgotten"
            assert not self.engine.conversations.branches.at(owner, before.turn_id)
            self.totals["forgotten"] += 1
            return
        self.running += sent
        for one in sent:
            self.totals[one.turn.origin.kind] += 1
            self._check_origin(one)
            self.totals["depth"] = max(self.totals["depth"], _depth(one.turn.request.sequence))

    def _prompt(self, parent: str | None, owner: str) -> tuple[int, ...]:
        """Draw a new prompt, that of another turn of the same parent, or a history that is resent."""
        choose = self.choose
        new = self.harness.prompt(choose.integer(1, choose.pick((10, 40, 90))), self.num_sent)
        alike = [
            sent for sent in self.sent.values() if sent.node.parent_id == parent and sent.node.owner == owner
        ]
        if alike and choose.pick((True, False)):
            prompt = choose.pick(alike).facts.prompt
            return prompt if choose.pick((True, False)) else (*prompt, *new)
        if parent is None and self.tokens and choose.pick((True, True, False)):
            return self._resent(new)
        return new

    def _resent(self, new: tuple[int, ...]) -> tuple[int, ...]:
        """Return parts of any owners' histories: a beginning, full chunks, or the beginnings of two."""
        choose, size = self.choose, self.config.cache.chunk_tokens
        one, other = (self.tokens[choose.pick(list(self.tokens))] for _ in range(2))
        num_chunks = choose.integer(1, max(len(one) // size, 1))
        if choose.pick((True, False)):
            return (*one[: choose.integer(1, len(one))], *new)
        return one[: num_chunks * size] + choose.pick(((), other[num_chunks * size :]))

    def _check_origin(self, sent: Sent) -> None:
        """Check that reused chunks belong to the same owner."""
        kind, num_tokens = sent.turn.origin
        if kind in ("chunks", "loaded"):
            context = (*sent.facts.history, *sent.facts.prompt)
            assert num_tokens < len(context)
            assert any(
                self.tokens[turn_id][:num_tokens] == context[:num_tokens]
                for turn_id, known in self.sent.items()
                if known.node.owner == sent.node.owner
            )

    def _step(self) -> None:
        for _ in range(self.choose.pick((1, 1, 4, 15))):
            if not self._step_once():
                return

    def _step_once(self) -> bool:
        num_commits = len(self.harness.store.commits)
        try:
            ended = self.engine.step()
        except KeyboardInterrupt:
            self._recover(
                {turn.turn_id for turns in self.harness.store.commits[num_commits:] for turn in turns}
            )
            return False
        self.check_ended(ended)
        self.engine.check_integrity()
        return self.engine.has_unfinished

    def check_ended(self, ended: list) -> None:
        by_turn = {sent.turn: sent for sent in self.running}
        assert {turn for turn in by_turn if turn.done} == set(ended)
        for turn in ended:
            sent = by_turn[turn]
            self.running.remove(sent)
            if turn.error is not None:
                assert isinstance(turn.error, StepFailedError | HistoryError)
                continue
            self.trees.check(sent, turn.output.token_ids)
            self._check_usage(sent)
            self.sent[sent.node.turn_id] = sent
            self.totals["turns"] += 1

    def _check_usage(self, sent: Sent) -> None:
        output, facts = sent.turn.output, sent.facts
        usage = output.usage
        computed = usage.recomputed_tokens + usage.prefilled_tokens
        known = usage.reused_gpu_tokens + usage.swapped_in_tokens
        assert known + computed == len(facts.history) + len(facts.prompt), usage
        assert min(getattr(usage, name) for name in COUNTED) >= 0, usage
        assert self.config.stateful or not known, "the stateless baseline kept state"
        num_granted, _ = self.harness.take_num_computed(sent.turn.request)
        num_extra = num_granted - computed - usage.resume_recomputed_tokens - (usage.output_tokens - 1)
        num_allowed = 2 + self.config.scheduler.draft_limit if output.finish_reason == "stop" else 1
        assert num_extra in range(num_allowed), (num_extra, usage)
        self.totals["found"] += known
        self.totals["computed"] += computed

    def _recover(self, committed: set[str]) -> None:
        """After an interrupt, drop all turns except committed ones, which are in the history."""
        self.engine.expire_idle()
        for sent in self.running:
            assert sent.turn.done, "a turn outlived an interrupted step"
            if sent.node.turn_id in committed:
                record = self.harness.store.load_turn(sent.node.owner, sent.node.turn_id)
                self.trees.check(sent, record.turns[-1].output_token_ids)
                self.sent[sent.node.turn_id] = sent
        self.running = []

    def _cancel(self) -> None:
        if self.running:
            sent = self.running.pop(self.choose.integer(0, len(self.running) - 1))
            self.engine.cancel(sent.turn)
            self.harness.bench.check_tokens(sent.facts, sent.turn.output.token_ids, whole=False)

    def _delete(self) -> None:
        """Delete the response of a turn; turns that only it needed are known no more."""
        responses = [
            one for one in self.sent.values() if one.node.attachment and one.node.turn_id not in self.deleted
        ]
        if not responses:
            return
        node = self.choose.pick(responses).node
        self.trees.delete(node.turn_id, node.owner)
        self.deleted.add(node.turn_id)
        for turn_id, sent in list(self.sent.items()):
            if sent.node.durable and not self.harness.store.has_turn(sent.node.owner, turn_id):
                del self.sent[turn_id]
                self.totals["removed"] += 1

    def _think(self) -> None:
        self.clock.advance(self.choose.integer(0, 40) ** 2 / 10)

    def _look(self) -> None:
        """Check that the map shows every chunk of an owner once."""
        for owner in ("ann", "bob"):
            num_shown = sum(_length(shown.states) for shown in self.engine.chunk_map(owner))
            lineages = [branch.sequence.lineage() for branch in self.engine.conversations.branches.of(owner)]
            owners = {own for lineage in lineages for own in lineage}
            assert num_shown == sum(len(own.chunks) - own.num_shared for own in owners)

    def _push_out(self) -> None:
        for turn_id in self._any_known():
            self.engine.push_out_turn(self.sent[turn_id].node.owner, turn_id)

    def _forget_state(self) -> None:
        for turn_id in self._any_known():
            self.engine.forget_turn_state(self.sent[turn_id].node.owner, turn_id)

    def _any_known(self) -> list[str]:
        known = [turn_id for turn_id, sent in self.sent.items() if sent.node.durable]
        return [self.choose.pick(known)] if known else []

    def _sweep(self) -> None:
        self.harness.forget_branches()

    def _expire(self) -> None:
        self.engine.expire_idle()

    def _drop(self) -> None:
        """Drop a turn's last reference: it is cancelled at the next call."""
        if self.running:
            sent = self.running.pop(self.choose.integer(0, len(self.running) - 1))
            turn = weakref.ref(sent.turn)
            node, facts = sent.node, sent.facts
            del sent
            if (held := turn()) is not None:  # frames of a failed step may hold it until they are collected
                self.running.append(Sent(held, node, facts))
        self.engine.expire_idle()

    def _fail(self) -> None:
        place = self.choose.pick(FAILING_PLACES)
        if place == "commit":
            self.harness.store.faults[place] = lambda: HistoryError("the disk is full")
        else:
            self.harness.runner.faults[place] = lambda: StepFailedError("the device failed")

    def _interrupt(self) -> None:
        place = self.choose.pick(INTERRUPTED_PLACES)
        faults = self.harness.store.faults if "commit" in place else self.harness.runner.faults
        faults[place] = KeyboardInterrupt

    def _restart(self) -> None:
        if self.path is not None:
            self.engine.close()
            self.running = []
            self.open()

    # The end of a scenario.

    def drain(self) -> None:
        self.harness.runner.faults.clear()
        self.harness.store.faults.clear()
        for _ in range(MAX_STEPS):
            if not self.engine.has_unfinished:
                break
            self._step_once()
        assert not self.running and not self.engine.has_unfinished, "turns do not end"

    def check_history(self) -> None:
        """Check that it has every durable turn, and no other."""
        for turn_id, sent in self.sent.items():
            try:
                record = self.harness.store.load_turn(sent.node.owner, turn_id)
            except UnknownTurnError:
                assert not sent.node.durable
                continue
            assert sent.node.durable and tuple(record.token_ids.tolist()) == self.tokens[turn_id]


def _depth(sequence: CachedSequence) -> int:
    return sum(1 for _ in sequence.lineage())


def _length(states: str) -> int:
    """Return the number of chunks in a run-length string."""
    return sum(int(count) for count in "".join(c if c.isdigit() else " " for c in states).split())


def run_tree_scenario(seed: int, prompt_order: str = "arrival", *, drafts: bool = False) -> Counter[str]:
    """Run one scenario from start to end; raise AssertionError on a failure.

    With `drafts`, an oracle makes drafts for running turns.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if drafts:
            plant_oracle(patch, FakeBench(), seed)
        scenario = TreeScenario(seed, Path(folder) if seed % 4 == 0 else None, prompt_order, drafts=drafts)
        try:
            scenario.run()
        except BaseException:
            print(f"failed: run_tree_scenario({seed}, {prompt_order!r}, drafts={drafts})")
            raise
        return scenario.totals


def _run(seed: int) -> tuple[int, Counter[str], str | None]:
    try:
        return seed, run_tree_scenario(seed) + run_fork_scenario(seed), None
    except Exception:  # the soak looks for any error
        return seed, Counter(), traceback.format_exc()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num_scenarios", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first scenario")
    parser.add_argument("--num_processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.num_scenarios)
    totals, deepest, failed = Counter(), 0, []
    with multiprocessing.get_context("spawn").Pool(args.num_processes) as pool:
        for seed, found, error in tqdm(pool.imap_unordered(_run, seeds, chunksize=8), total=len(seeds)):
            deepest = max(deepest, found.pop("depth", 0))
            totals += found
            if error is not None:
                failed.append(seed)
                tqdm.write(f"seed {seed}:\n{error}")
    print(f"tree scenarios {seeds.start} to {seeds.stop - 1}: {dict(totals)}, deepest {deepest}")
    print(f"{len(failed)} failed: {sorted(failed)[:20]}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
