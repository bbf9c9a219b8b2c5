"""A process that generates until it is killed, and reports its progress to its parent.

Owns the engine's shape, and the marks: started work, and every turn that the library has returned. Does not
know when it will die. Called by `restart_schedule`, as the target of a process.

Marks are tuples `(name, ...)`, each one write to the pipe:
    ("started",)  ("opening", fingerprint)  ("opened",)  ("ready",)
    ("submitted", keys)  ("step",)  ("committing", keys)  ("reported", Report)
    ("halted",) in the middle of a transaction  ("closing",)  ("finished",)
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax

from pensieve_jax import LLM, CacheConfig, EngineConfig, SchedulerConfig, assembly
from pensieve_jax.config import RunnerConfig
from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import Output
from pensieve_jax.decoding.device import sampler
from pensieve_jax.decoding.sampling_rows import SamplerMode
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history import SQLiteHistoryStore, TurnRecord, table_store
from tests.kill.script import MAX_CONTEXT_TOKENS, TURNS_PER_CONVERSATION, Script, TurnKey

MODEL = "random:llama-tiny"
CHUNK_TOKENS = 16
CPU_PAGES = 6


class Report(NamedTuple):
    """A turn that the library has returned."""

    key: TurnKey
    token_ids: tuple[int, ...]
    seed: int
    swapped_in_tokens: int
    recomputed_tokens: int


class Task(NamedTuple):
    """Work of one process.

    Attributes:
        path: of the history; None is one in memory.
        how: "step" drives the engine turn by turn, "generate" the public call with a turn of every lane; both
            run forever. "once" is one call of "generate", "whole" as many as a conversation has turns; both
            close the library and end. "close" is "once", and then waits to be killed.
        halt_at_row: wait to be killed after this number of rows, before their transaction is committed.
    """

    path: str | None
    compilation_cache_dir: str
    script: Script
    how: str
    halt_at_row: int | None = None


def run(task: Task, pipe: Connection) -> None:
    """Run the task; the target of the process."""
    pipe.send(("started",))
    jax.config.update("jax_platforms", "cpu")
    _compile_less()
    _announce_history(pipe)
    if task.halt_at_row is not None:
        _halt_at_row(pipe, task.halt_at_row)
    llm = LLM(MODEL, dtype="float32", history=task.path, config=_config(task), progress=False)
    _announce_steps(llm, pipe)
    pipe.send(("ready",))
    num_turns = {info.conversation_id: info.num_turns for info in llm.conversations()}
    keys = task.script.next_keys(num_turns)
    if task.how == "step":
        _run_steps(llm, pipe, task.script, keys)
    while task.how == "generate":
        _run_generate(llm, pipe, task.script, keys)
        keys = [task.script.after(key) for key in keys]
    for _ in range(TURNS_PER_CONVERSATION if task.how == "whole" else 1):
        _run_generate(llm, pipe, task.script, keys)
        keys = [task.script.after(key) for key in keys]
    pipe.send(("closing",))
    llm.close()
    if task.how == "close":
        signal.pause()
    pipe.send(("finished",))


def _config(task: Task) -> EngineConfig:
    """Return a one-bucket configuration; the GPU, and both tiers, hold less than half of the lanes."""
    return EngineConfig(
        cache=CacheConfig(gpu_pages=10, cpu_pages=CPU_PAGES, chunk_tokens=CHUNK_TOKENS),
        scheduler=SchedulerConfig(
            max_num_running=4,
            max_num_batched_tokens=24,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            token_buckets=(24,),
        ),
        runner=RunnerConfig(
            attention_backend="xla",
            max_num_staged_pages=4,  # one batch size, so that little is compiled
            max_logprobs=1,
            compilation_cache_dir=task.compilation_cache_dir,
        ),
    )


def _compile_less() -> None:
    """Skip the samplers that no lane needs: starting is most of a process's work."""
    modes = (SamplerMode(False, False, False), SamplerMode(True, False, False))
    sampler.all_modes = lambda: modes


def _announce_history(pipe: Connection) -> None:
    """Announce the opening of the history, and every commit just before it happens."""

    class AnnouncingStore(SQLiteHistoryStore):
        def __init__(self, path: Any, *, fingerprint: str, **options: Any) -> None:
            pipe.send(("opening", fingerprint))
            super().__init__(path, fingerprint=fingerprint, **options)
            pipe.send(("opened",))

        def commit(self, turns: Sequence[TurnRecord], *rest: Any) -> Mapping[int, PensieveError]:
            pipe.send(("committing", [TurnKey(turn.conversation_id, turn.turn_index) for turn in turns]))
            return super().commit(turns, *rest)

    assembly.open_store = AnnouncingStore


def _halt_at_row(pipe: Connection, num_rows: int) -> None:
    append, rows_to_come = table_store.append, iter(range(num_rows - 1, -1, -1))

    def halting(*args: Any) -> None:
        append(*args)
        if next(rows_to_come) == 0:
            pipe.send(("halted",))
            signal.pause()

    table_store.append = halting


def _announce_steps(llm: LLM, pipe: Connection) -> None:
    step = llm.engine.step

    def announced() -> Any:
        pipe.send(("step",))
        return step()

    llm.engine.step = announced


def _run_steps(llm: LLM, pipe: Connection, script: Script, keys: list[TurnKey]) -> None:
    """Submit a lane's next turn as soon as its last one is reported."""
    key_of: dict[Any, TurnKey] = {}
    while True:
        pipe.send(("submitted", keys))
        turns = [script.turn(key) for key in keys]
        specs = [TurnSpec(turn.prompt_ids, turn.params, turn.key.conversation_id) for turn in turns]
        key_of.update(zip(llm.engine.submit(specs), keys, strict=True))
        ended: list[Any] = []
        while not ended:
            ended = llm.engine.step()
        keys = []
        for turn in ended:
            key = key_of.pop(turn)
            _report(pipe, key, turn.result())
            keys.append(script.after(key))


def _run_generate(llm: LLM, pipe: Connection, script: Script, keys: list[TurnKey]) -> None:
    pipe.send(("submitted", keys))
    turns = [script.turn(key) for key in keys]
    outputs = llm.generate(
        [turn.prompt_ids for turn in turns],
        [turn.params for turn in turns],
        conversation_ids=[turn.key.conversation_id for turn in turns],
    )
    for key, output in zip(keys, outputs, strict=True):
        _report(pipe, key, output)


def _report(pipe: Connection, key: TurnKey, output: Output) -> None:
    usage = output.usage
    report = Report(key, output.token_ids, output.seed, usage.swapped_in_tokens, usage.recomputed_tokens)
    pipe.send(("reported", report))
