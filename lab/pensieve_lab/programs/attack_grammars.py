"""Attack on a server: hostile grammars, tools, options and messages beside one client that streams.

    python -m pensieve_lab.programs.attack_grammars --json=FILE

Starts `pensieve serve` with a tiny model that takes tools and has a context of 32,768 tokens. One client
streams chats in a process of its own. The first `--quiet_s` are without others. Then each group of attacks of
`pensieve_lab.hostile.requests` begins with its control: the same number of requests with the same prompts and
lengths, in which nothing is hostile. The attacks follow, `--num_clients` requests at a time.

The report has two kinds of figures. The gaps between the tokens of the stream are wall time, so other
programs on the machine count. So does the time to the first token of each of its replies, which has no
limit: a prompt waits for longer ones before it, in the controls as well. How long the server's event loop
and its engine's thread were held is processor time (see `pensieve_lab.hostile.slices`). An attack whose gap
is too long runs again with a new server, up to `--max_runs` times in all, and the shortest of these gaps
counts. The last line is one JSON document (see `--json`).

The exit status is 1 if an answer is neither valid nor a typed refusal, or if the stream failed or changed. It
is 1 as well if an attack held one of the two threads for longer than `--max_held_ms` and than its control. So
it is if a gap exceeds the longest one of the control by more than `--max_stall_ms`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
from absl import flags

from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_lab.hostile.answers import Answers
from pensieve_lab.hostile.request import MODEL, HostileRequest
from pensieve_lab.hostile.requests import hostile_requests
from pensieve_lab.hostile.slices import Slice, longest_ms, read_slices
from pensieve_lab.hostile.summary import Attack, Limits, Run, problems, summary
from pensieve_lab.hostile.watching import StreamWatcher
from pensieve_lab.scripted.model import make_tool_model
from pensieve_lab.serving.served import ServedProcess
from pensieve_lab.soaking.samples import child_of, process_figures

FLAGS = flags.FLAGS
_TIMEOUT_S = 120.0
_PAGES = "--gpu_pages=8192"  # so many that no turn is suspended for lack of them
_LAUNCHER = ("-m", "pensieve_lab.hostile.timed_server")


type Groups = Mapping[str, Sequence[HostileRequest]]


class _Figures(NamedTuple):
    """The spans before and after the attacks, and the attacks."""

    quiet: Run
    after: Run
    attacks: list[Attack]


def main() -> int:
    groups = {
        group: [one for one in requests if FLAGS.only in f"{group}: {one.name}"]
        for group, requests in hostile_requests().items()
    }
    groups = {group: requests for group, requests in groups.items() if requests}
    if FLAGS.address:
        address = urlsplit(FLAGS.address)
        return _report(*_attack(address.hostname or "", address.port or 80, None, None, groups))
    return _report(*_repeated(groups))


def _repeated(groups: Groups) -> _Figures:
    """Run all attacks, and those again whose stream had too long a gap, each time with a new server."""
    quiet, after, attacks = _run_served(groups)
    found = {(one.group, one.name): one for one in attacks}
    for _ in range(FLAGS.max_runs - 1):
        slow = [key for key, one in found.items() if _is_slow(one)]
        if not slow:
            break
        print("again:", *(f"{group}: {name}" for group, name in slow), sep="\n    ", flush=True)
        chosen = {
            group: [one for one in requests if (group, one.name) in slow]
            for group, requests in groups.items()
            if any(group == other for other, _ in slow)
        }
        for one in _run_served(chosen).attacks:
            found[one.group, one.name] = found[one.group, one.name].repeated(one)
    return _Figures(quiet, after, list(found.values()))


def _is_slow(one: Attack) -> bool:
    return one.run.gaps.max_ms > one.allowed_gap_ms(FLAGS.max_stall_ms)


def _run_served(groups: Groups) -> _Figures:
    """Start a server and attack it."""
    with tempfile.TemporaryDirectory(prefix="pensieve-attack-") as directory:
        model, slices = Path(directory, "model"), Path(directory, "slices")
        model.mkdir()
        slices.mkdir()
        make_tool_model(model)
        given = (f"--model={model}", f"--served_model_name={MODEL}", f"--slices={slices}", _PAGES)
        with ServedProcess((*given, *shlex.split(FLAGS.server_flags)), _LAUNCHER) as server:
            return _attack(server.host, server.port, server.process.pid, slices, groups)


def _attack(host: str, port: int, pid: int | None, slices: Path | None, groups: Groups) -> _Figures:
    """Run all attacks on a server.

    Args:
      host, port: the server's address.
      pid: its process; None if its memory is not known.
      slices: the directory of its slices; None if it notes none.
      groups: the requests of each group.
    """
    with StreamWatcher(host, port) as watcher:
        time.sleep(1.0)  # the first turn of a server may be slower
        watcher.take()
        runner = _Runner(watcher, pid, slices)
        quiet = runner.wait(FLAGS.quiet_s)
        print(f"without attack: {quiet.in_words()}", flush=True)
        attacks = asyncio.run(runner.run(f"http://{host}:{port}", groups))
        return _Figures(quiet, runner.wait(FLAGS.quiet_s), attacks)


class _Runner:
    """The runs of one server."""

    def __init__(self, watcher: StreamWatcher, pid: int | None, slices: Path | None) -> None:
        self._watcher, self._pid, self._slices = watcher, pid, slices

    def wait(self, seconds: float) -> Run:
        """Return the run of a span without other clients."""
        began_s = time.monotonic()
        time.sleep(seconds)
        return self._run(began_s, Answers())

    async def run(self, address: str, groups: Groups) -> list[Attack]:
        """Run the control of each group, then its attacks."""
        attacks: list[Attack] = []
        async with httpx2.AsyncClient(base_url=address, timeout=_TIMEOUT_S, trust_env=False) as http:
            for group, requests in groups.items():
                bodies = [(one.control_route, one.control) for one in requests]
                control = await self._send(http, bodies, FLAGS.control_s)
                print(f"control of {group}: {control.in_words()}", flush=True)
                for name in dict.fromkeys(one.name for one in requests):
                    sent = [one for one in requests if one.name == name]
                    bodies = [(one.route, one.body) for one in sent]
                    may_fail = any(one.may_fail for one in sent)
                    found = await self._send(http, bodies, may_fail=may_fail)
                    attacks.append(Attack(group, name, control, found))
                    print(
                        f"{name:32.32} {found.in_words()}", *found.answers.wrong[:3], sep="\n    ", flush=True
                    )
        return attacks

    async def _send(
        self,
        http: httpx2.AsyncClient,
        bodies: Sequence[tuple[str, bytes]],
        limit_s: float | None = None,
        *,
        may_fail: bool = False,
    ) -> Run:
        """Send requests, `--num_clients` at a time, and no further ones after `limit_s`."""
        self._watcher.take()
        answers, began_s = Answers(may_fail=may_fail), time.monotonic()
        waiting = iter(bodies)

        async def client() -> None:
            for route, body in waiting:
                if limit_s is not None and time.monotonic() - began_s > limit_s:
                    return
                await answers.send(http, route, body)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(FLAGS.num_clients, len(bodies))):
                group.create_task(client())
        return self._run(began_s, answers)

    def _run(self, began_s: float, answers: Answers) -> Run:
        gaps, ended_s = self._watcher.take(), time.monotonic()
        rss_mb, held_ms = 0.0, {}
        if self._pid is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended, which the answers tell
                figures = process_figures("front", self._pid)
                figures |= process_figures("engine", child_of(self._pid))
                rss_mb = figures["front_rss_mb"] + figures["engine_rss_mb"]
        if self._slices is not None:
            slices: list[Slice] = read_slices(self._slices)
            held_ms = longest_ms(slices, began_s, ended_s)
        return Run(ended_s - began_s, answers, gaps, held_ms, rss_mb)


def _report(quiet: Run, after: Run, attacks: Sequence[Attack]) -> int:
    limits = Limits(stall_ms=FLAGS.max_stall_ms, held_ms=FLAGS.max_held_ms)
    found = summary(quiet, after, attacks)
    columns = ["group", "requests", "longest gap (ms)", "of control", "first token (ms)", "of control"]
    columns += ["held (ms)", "of control"]
    print(table(columns, [list(row.values())[:8] for row in found["groups"].values()]))
    print(table(["answer", "number"], list(found["answers"].items())))
    wrong = problems(after, attacks, limits)
    for line in wrong:
        print(line)
    results: dict[str, Any] = {**found, "problems": wrong, "limits": limits._asdict()}
    units = {
        "gaps": "ms of wall time between two tokens of a stream",
        "first": "ms of wall time from a request to its first token",
        "held": "ms of processor time of one thread",
        "rss_mb": "MB (10^6 bytes) of both processes",
    }
    print_document(json_line("attack_grammars", results, units=units, device="cpu"))
    return EXIT_FAILED if wrong else 0


def define_flags() -> None:
    flags.DEFINE_string("address", None, "URL of a running server; default: one is started.")
    flags.DEFINE_string("only", "", "Runs the attacks whose group and name contain this.")
    flags.DEFINE_string("server_flags", "", "More flags of `pensieve serve`.")
    flags.DEFINE_integer("num_clients", 8, "Number of requests of an attack at a time.")
    flags.DEFINE_integer("max_runs", 5, "Most runs of an attack whose gap is too long.", lower_bound=1)
    flags.DEFINE_float("quiet_s", 5.0, "Seconds of the stream before and after all attacks.")
    flags.DEFINE_float("control_s", 6.0, "Seconds after which no further request of a control is sent.")
    flags.DEFINE_float("max_stall_ms", 100.0, "Longest stall that an attack may cause, in ms.")
    flags.DEFINE_float("max_held_ms", 50.0, "Longest time that an attack may hold a thread, in ms.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
