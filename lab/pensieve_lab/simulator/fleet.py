"""Replicas that join, leave and die, behind front ends that know outdated loads.

Owns: membership, what is lost with a replica, front ends with old loads, and the counts of both.
Does not know: routing rules (`pensieve_jax.balance`), or what happens next (`driving`).
"""

from __future__ import annotations

import functools
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from pensieve_jax.balance import IncomingTurn, Load
from pensieve_jax.core.clock import Clock
from pensieve_lab.balance.policy import Policy
from pensieve_lab.simulator.driving import EventQueue, drive
from pensieve_lab.workload import Session
from pensieve_lab.workload.client import Client
from pensieve_lab.workload.server import History, Server
from pensieve_lab.workload.turns import Answer, UserTurn


class MemberClock(Clock, Protocol):
    """Clock that can be advanced."""

    def advance_to(self, time_s: float) -> None:
        """Advance to `time_s`, unless that has passed."""
        ...


class Member(Server, Protocol):
    """Server that reports its load."""

    @property
    def clock(self) -> MemberClock:
        """Clock of the server."""
        ...

    @property
    def load(self) -> Load:
        """Load of the server."""
        ...

    @property
    def unanswered(self) -> Sequence[UserTurn]:
        """Submitted turns without an answer."""
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """Change of the fleet.

    Attributes:
      at_s: time of the change.
      kind: "death" loses all state and all running turns, which are sent again; "leave" takes no new turns
        and finishes those that run; "join" is a new replica.
      name: the replica. One that joins under the name of a former replica gets its place on the hash ring.
    """

    at_s: float
    kind: Literal["death", "leave", "join"]
    name: str


@dataclass(frozen=True, kw_only=True)
class Fronts:
    """Front ends, which route turns.

    Attributes:
      count: number of front ends, each with its own memory.
      sticky: whether a root always uses the same front end; otherwise each turn uses a random one.
      staleness_s: loads are between this and twice this old, except for turns that a front end itself sent.
      detection_s: delay until a death is noticed and running turns are sent again.
    """

    count: int = 4
    sticky: bool = True
    staleness_s: float = 0.25
    detection_s: float = 1.0


@dataclass(slots=True)
class _Front:
    """Front end: its rule, and the turns it has sent since the loads it knows, with their times."""

    policy: Policy
    sent: deque[tuple[float, str, IncomingTurn, int]] = field(default_factory=deque)


class Fleet:
    """Replicas and front ends.

    Attributes:
      num_moved: turns with a history that were served by another replica than the turn before.
      num_resent: turns that were lost with a replica and sent again.
    """

    def __init__(
        self,
        make: Callable[[int, float], Member],
        make_policy: Callable[[], Policy],
        names: Sequence[str],
        *,
        fronts: Fronts | None = None,
        changes: Sequence[Change] = (),
        seed: int = 0,
        start_s: float = 0.0,
    ) -> None:
        """Start the fleet. `make` makes a replica from a number and a time, `make_policy` a front end's
        rule."""
        self._make = make
        self._fronts = fronts or Fronts()
        self._senders = [_Front(make_policy()) for _ in range(self._fronts.count)]
        self._random = random.Random(seed)
        self.servers: list[Member] = []
        self._names: list[str] = []
        self._open: dict[str, int] = {}
        for name in names:
            self._enter(name, start_s)
        self._dead: dict[int, tuple[Load, list[UserTurn]]] = {}
        self._agenda = EventQueue()
        for change in changes:
            self._agenda.add(change.at_s, functools.partial(self._happen, change))
        self._known: tuple[float, dict[str, Load]] | None = None
        self._coming: tuple[float, dict[str, Load]] | None = None
        self._places: dict[str, int] = {}
        self._roots: dict[str, str] = {}  # conversations whose root was renamed by the rule
        self._resent: dict[tuple[str, int], UserTurn] = {}
        self.num_moved = self.num_resent = 0
        self._tell()

    def place(self, sessions: Sequence[Session]) -> None:
        """Give the KV cache of sessions from before the run to the replicas that the rule chooses; go to time
        0."""
        known = sorted((s for s in sessions if s.first_turn), key=lambda session: session.last_active_s)
        for session in known:
            conversation = session.conversation
            name = conversation.conversation_id
            asked = IncomingTurn(conversation.root_id, name, 0, session.num_history_tokens)
            index = self._open[self._sender(asked.root).policy.home(asked)]
            history = History(name, session.num_history_tokens, session.last_active_s)
            self.servers[index].remember([history])
            self._places[name] = index
        for server in self.servers:
            server.clock.advance_to(0.0)

    def serve(self, client: Client, until_s: float) -> Iterator[Answer]:
        """Continue until `until_s`; see `drive`."""
        return drive(
            client, self.servers, self._send, until_s=until_s, agenda=self._agenda, settle=self._settle
        )

    def name_of(self, index: int) -> str:
        """Return the name of a replica by its number."""
        return self._names[index]

    def loads(self) -> dict[str, Load]:
        """Return the current loads of all members; one whose death was not noticed has its last load."""
        dead = self._dead
        return {
            name: dead[index][0] if index in dead else self.servers[index].load
            for name, index in self._open.items()
        }

    def _send(self, turn: UserTurn) -> int:
        given = turn.root_id or turn.conversation_id
        root = self._roots.get(turn.conversation_id, given)
        asked = IncomingTurn(root, turn.conversation_id, turn.prompt_tokens, turn.num_history_tokens)
        front = self._sender(given)
        loads = self._seen_by(front, turn.arrival_s)
        if not turn.num_history_tokens and (root := front.policy.name(asked, loads)) != given:
            self._roots[turn.conversation_id] = root  # its ids carry this root from now on
            asked = asked._replace(root=root)
        index = self._open[front.policy.choose(asked, loads, turn.arrival_s)]
        before = self._places.get(turn.conversation_id)
        if before is not None and before != index and turn.num_history_tokens:
            self.num_moved += 1
        self._places[turn.conversation_id] = index
        lost = turn.num_history_tokens if before != index else 0
        front.sent.append((turn.arrival_s, self._names[index], asked, turn.prompt_tokens + lost))
        if index in self._dead:
            self._dead[index][1].append(turn)
        else:
            self.servers[index].submit(turn)
        return index

    def _sender(self, root: str) -> _Front:
        if len(self._senders) == 1:
            return self._senders[0]
        if self._fronts.sticky:
            return self._senders[zlib.crc32(root.encode()) % len(self._senders)]
        return self._senders[self._random.randrange(len(self._senders))]

    def _seen_by(self, front: _Front, now_s: float) -> Mapping[str, Load]:
        """Return the loads as last reported plus the turns that this front end has sent since."""
        time_s, reported = self._reported(now_s)
        while front.sent and front.sent[0][0] < time_s:
            front.sent.popleft()
        if not front.sent or not self._fronts.staleness_s:
            return reported
        loads = dict(reported)
        for _, name, asked, num_tokens in front.sent:
            if name in loads:
                loads[name] = loads[name].with_turn(asked, num_tokens)
        return loads

    def _reported(self, now_s: float) -> tuple[float, dict[str, Load]]:
        if self._coming is None or self._known is None:
            self._known = self._coming = (now_s, self.loads())
        elif now_s >= self._coming[0] + self._fronts.staleness_s:
            self._known, self._coming = self._coming, (now_s, self.loads())
            if not self._fronts.staleness_s:
                self._known = self._coming
        return self._known

    def _settle(self, answer: Answer) -> Answer:
        turn = answer.turn
        sent_first = self._resent.pop((turn.conversation_id, turn.turn_index), None)
        return answer if sent_first is None else replace(answer, turn=sent_first)

    def _happen(self, change: Change) -> list[int]:
        if change.kind == "death":
            return self._die(change)
        if change.kind == "join":
            self._enter(change.name, change.at_s)
        else:
            del self._open[change.name]
        self._tell()
        return []

    def _die(self, change: Change) -> list[int]:
        """Kill a replica; until that is noticed, turns are still sent there, unless it was replaced."""
        index = self._open[change.name]
        if index in self._dead:  # already dead; its lost turns are recorded
            return []
        server = self.servers[index]
        self._dead[index] = server.load, list(server.unanswered)
        self.servers[index] = self._make(index, change.at_s)  # placeholder without turns
        seen_s = change.at_s + self._fronts.detection_s
        self._agenda.add(seen_s, lambda: self._see_death(index, seen_s))
        return []

    def _see_death(self, index: int, now_s: float) -> list[int]:
        _, lost = self._dead.pop(index)
        if self._open.get(self._names[index]) == index:  # it has neither left nor been replaced meanwhile
            del self._open[self._names[index]]
            self._tell()
        return [self._send_again(turn, now_s) for turn in lost]

    def _send_again(self, turn: UserTurn, now_s: float) -> int:
        key = (turn.conversation_id, turn.turn_index)
        self._resent.setdefault(key, turn)
        self.num_resent += 1
        return self._send(replace(turn, arrival_s=now_s))

    def _enter(self, name: str, now_s: float) -> None:
        self.servers.append(self._make(len(self.servers), now_s))
        self._names.append(name)
        self._open[name] = len(self.servers) - 1

    def _tell(self) -> None:
        """Update the members of all front ends at once; a new member has no load."""
        self._known = self._coming = None
        for front in self._senders:
            front.policy.set_members(self._open)
            front.sent.clear()
