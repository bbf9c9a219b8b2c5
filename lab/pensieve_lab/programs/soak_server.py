"""Soak test: many clients of every kind for an hour, and a check that the server's resources do not grow.

    python -m pensieve_lab.programs.soak_server --minutes=60 --output_dir=soak

Starts `pensieve serve` with its own history and lets clients use Responses, Conversations, Chat Completions
and Completions: streams, forks, edits, responses in the background, cancels, and disconnects. Every
`--sample_s` it samples memory, threads and descriptors of both processes and the sizes of all tables of ids.
The report has the first value of each, its medians in the second and the last third, and the last. The
directory gets `samples.json` after every sample, and `soak.png`. The last line is one JSON document (see
`--json`). The exit status is 1 if a figure grew, or did not return to its base value when the clients had
left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx2
from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_lab.serving.served import ServedProcess
from pensieve_lab.soaking.clients import SoakClient
from pensieve_lab.soaking.plot import plot_samples
from pensieve_lab.soaking.samples import Samples, child_of, process_figures, table_figures

FLAGS = flags.FLAGS
_SETTLED_S = 30.0
_AT_REST = ("front_turns_in_engine", "front_turns_in_queue", "front_owners_in_flight", "engine_running")
_NO_LONGER = ("front_locked_conversations", "front_background_responses", "front_requests_with_keys")
_SMALL = (
    "--model=chat --gpu_pages=96 --cpu_pages=192 --max_num_running=8 --token_buckets=8,64 "
    "--max_context_tokens=1024 --idle_ttl_s=120 --max_index_bytes=500000"
)


class Soak:
    """Soak run against one server."""

    def __init__(self, server: ServedProcess, history: Path) -> None:
        """Take a server that is ready, and the file of its history."""
        self._server = server
        self._history = history
        self._began_s = time.monotonic()
        self.samples = Samples()
        self.counts: Counter[str] = Counter()
        self.left_over: dict[str, float] = {}

    async def run(self) -> None:
        """Run clients and samples, and record what is left when the clients have gone."""
        ending = asyncio.Event()
        async with httpx2.AsyncClient(base_url=self._server.address, timeout=60.0, trust_env=False) as http:
            async with asyncio.TaskGroup() as group:
                for number in range(FLAGS.num_clients):
                    client = SoakClient(
                        self._server.address, FLAGS.seed + number, pause_s=FLAGS.pause_s, counts=self.counts
                    )
                    group.create_task(client.run(ending))
                while self._minutes() < FLAGS.minutes:
                    await self._sample(http)
                    left_s = FLAGS.minutes * 60 - (time.monotonic() - self._began_s)
                    await asyncio.sleep(max(0.0, min(FLAGS.sample_s, left_s)))
                ending.set()
            await self._settle(http)

    def _minutes(self) -> float:
        return (time.monotonic() - self._began_s) / 60

    async def _sample(self, http: httpx2.AsyncClient) -> None:
        figures = await self._figures(http)
        self.samples.add(self._minutes(), figures)
        with contextlib.suppress(FileNotFoundError):  # a history may have no write-ahead log
            wal = self._history.with_name(self._history.name + "-wal")
            self.samples.series.setdefault("history_mb", [0.0] * len(self.samples.minutes))[-1] = round(
                (self._history.stat().st_size + wal.stat().st_size) / 1e6, 2
            )
        if FLAGS.output_dir:
            kept = {"minutes": self.samples.minutes, "series": self.samples.series, "counts": self.counts}
            (Path(FLAGS.output_dir) / "samples.json").write_text(json.dumps(kept))
        print(
            f"{self._minutes():6.1f} min  {sum(self.counts[k] for k in self.counts if 'status' in k):7d} "
            f"answers  front {figures['front_rss_mb']:.1f} MB  engine {figures['engine_rss_mb']:.1f} MB  "
            f"turns known {figures['front_turns_remembered']:.0f}/{figures['engine_known_turns']:.0f}",
            flush=True,
        )

    async def _figures(self, http: httpx2.AsyncClient) -> dict[str, float]:
        pid = self._server.process.pid
        answer = await http.get("/v1/pensieve/stats")
        answer.raise_for_status()
        return {
            **process_figures("front", pid),
            **process_figures("engine", child_of(pid)),
            **table_figures(answer.json()),
        }

    async def _settle(self, http: httpx2.AsyncClient) -> None:
        """Wait until nothing is in flight; what remains after `_SETTLED_S` is recorded as left over."""
        deadline_s = time.monotonic() + _SETTLED_S
        while True:
            figures = await self._figures(http)
            self.left_over = {name: figures[name] for name in (*_AT_REST, *_NO_LONGER) if figures[name]}
            if not self.left_over or time.monotonic() > deadline_s:
                return
            await asyncio.sleep(0.2)


def main() -> int:
    directory = Path(FLAGS.output_dir) if FLAGS.output_dir else None
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    if FLAGS.num_clients < 1:
        raise ConfigError("--num_clients", FLAGS.num_clients, "at least 1")
    with tempfile.TemporaryDirectory() as private:
        history = Path(private) / "history.sqlite"
        with ServedProcess([*shlex.split(FLAGS.server_flags), f"--history={history}"]) as server:
            soak = Soak(server, history)
            asyncio.run(soak.run())
    growing = {name: how for name, how in soak.samples.growing().items() if name != "history_mb"}
    return report(soak, growing, directory)


def report(soak: Soak, growing: dict[str, str], directory: Path | None) -> int:
    """Print the report; return the exit status."""
    summary = soak.samples.summary()
    columns = ["", "first", "second_third", "last_third", "largest", "last"]
    print(table(columns, [[name, *row.values()] for name, row in summary.items()]))
    for name, how in growing.items():
        print(f"{name} grows: {how}")
    for name, value in soak.left_over.items():
        print(f"{name} is {value:g} when the clients have gone")
    if directory is not None:
        title = f"{FLAGS.num_clients} clients for {FLAGS.minutes:g} minutes"
        plot_samples(soak.samples, title, directory / "soak.png")
    results = {
        "minutes": FLAGS.minutes,
        "num_clients": FLAGS.num_clients,
        "requests": dict(sorted(soak.counts.items())),
        "figures": summary,
        "growing": growing,
        "left_over": soak.left_over,
        "sampled_minutes": soak.samples.minutes,
        "samples": soak.samples.series,
    }
    units = {"rss": "MB (10^6 bytes)", "tables": "rows", "minutes": "minutes since the start"}
    print_document(json_line("soak_server", results, units=units, device="cpu"))
    return EXIT_FAILED if growing or soak.left_over else 0


def define_flags() -> None:
    flags.DEFINE_integer("num_clients", 50, "Number of concurrent clients.")
    flags.DEFINE_float("minutes", 60.0, "Minutes that clients run.")
    flags.DEFINE_float("pause_s", 5.0, "A client's mean pause between two requests.")
    flags.DEFINE_float("sample_s", 60.0, "Seconds between two samples.")
    flags.DEFINE_integer("seed", 0, "Seed of the clients' actions.")
    flags.DEFINE_string(
        "output_dir", None, "Directory of samples.json and soak.png; default: neither is written."
    )
    flags.DEFINE_string("server_flags", _SMALL, "Flags of `pensieve serve`.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
