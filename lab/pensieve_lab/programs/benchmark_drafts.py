"""Tokens per second with drafts from the conversation's history, beside the same replies without.

    python -m pensieve_lab.programs.benchmark_drafts --model=random:llama2-13b-gqa10 --dtype=bfloat16

The replies are given: edits of files of this checkout that stand in the prompt, as a perfect agent would
write them, and pages of this checkout that go on. So they are a best case for edits, and prose rather than
chat; `--chats=FILE` adds dialogues, whose lines are `{"turns": [[speaker, text], ...]}`. Every step computes
what it would for a model that gives these replies; only the chosen ids are replaced.

Each number of users has as many turns in progress, and a user sends the next one when the last has ended. One
engine runs without drafts and the next one with them, each with its own compiled steps. For each set and
number of users:

- Tokens per second of a user: of each turn from its first token to its last, the median.
- Tokens per second of all, prompts included.
- Tokens of a turn per step with a draft of it, and the share of drafted tokens that held.
- The share of steps with drafts.

A preset has no tokenizer, so one with as many ids as the model's vocabulary is learned from the text of this
checkout. The last line is one JSON document (see `--json`). The exit status is 1 if a reply differs from its
script.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from pensieve_jax import ConfigError, EngineConfig, SamplingParams
from pensieve_jax.commands.engine_flags import (
    TINY_MODEL,
    define_engine_flags,
    engine_config,
    model_limits,
    open_parts,
    refuse_sizes,
)
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.turn import Turn
from pensieve_lab.common.list_flags import numbers
from pensieve_lab.common.spread import Spread
from pensieve_lab.drafts.scripted_runner import ScriptedRunner
from pensieve_lab.drafts.tasks import EDITS, Task, chats, edits, encoded, pages
from pensieve_lab.steps.grammar_rows import learned_tokenizer

FLAGS = flags.FLAGS
Figures = dict[str, Any]
_ROOT = Path(__file__).parents[3]
_COUNTED = ("num_steps", "num_draft_steps", "num_drafts", "num_draft_tokens", "num_accepted_draft_tokens")
_WITHOUT, _WITH = "off", "history"


def sized_config(num_users: Sequence[int], max_prompt: int) -> EngineConfig:
    """Return the flags' engine with pages for these users, whose contexts all fit."""
    refuse_sizes()
    config = engine_config()
    longest = max_prompt + FLAGS.max_reply_tokens + 1
    scheduler = dataclasses.replace(
        config.scheduler, max_num_running=max(num_users), max_num_rows=None, max_context_tokens=longest
    )
    num_pages = (max(num_users) + 1) * -(-longest // config.cache.chunk_tokens) * 2
    return dataclasses.replace(
        config, scheduler=scheduler, cache=dataclasses.replace(config.cache, gpu_pages=num_pages)
    )


def with_option(config: EngineConfig, speculation: str) -> EngineConfig:
    """Return the configuration with or without drafts."""
    max_draft_tokens = config.scheduler.max_draft_tokens if speculation == _WITH else None
    scheduler = dataclasses.replace(
        config.scheduler, speculation=speculation, max_draft_tokens=max_draft_tokens
    )
    return dataclasses.replace(config, scheduler=scheduler)


class Load:
    """Users of one engine, who send the tasks of a set."""

    def __init__(self, engine: Engine, runner: ScriptedRunner) -> None:
        self._engine, self._runner = engine, runner
        self.num_wrong = 0

    def measure(self, tasks: Sequence[Task], num_users: int) -> Figures:
        """Run all tasks and return the figures of this set and number of users."""
        engine = self._engine
        waiting = list(enumerate(tasks))
        running: dict[Turn, tuple[Task, list[float]]] = {}
        before, rates, num_tokens = engine.stats(), [], 0
        start_s = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < num_users:
                number, task = waiting.pop(0)
                running[self._send(number, task)] = task, []
            ended = engine.step()
            now_s = time.perf_counter()
            for turn, (_, began_s) in running.items():
                if not began_s and turn.token_ids:
                    began_s.append(now_s)
            for turn in ended:
                task, began_s = running.pop(turn)
                self.num_wrong += list(turn.result().token_ids) != task.reply
                num_tokens += len(task.reply)
                if len(task.reply) > 1 and now_s > began_s[0]:
                    rates.append((len(task.reply) - 1) / (now_s - began_s[0]))
        elapsed_s = time.perf_counter() - start_s
        stats = engine.stats()
        counts = {name: stats[name] - before[name] for name in _COUNTED}
        return {
            "num_turns": len(tasks),
            "reply_tokens": num_tokens,
            "user_tokens_per_s": Spread.of(rates).as_dict(),
            "tokens_per_s": num_tokens / elapsed_s,
            "tokens_per_draft": 1 + counts["num_accepted_draft_tokens"] / max(counts["num_drafts"], 1),
            "share_held": counts["num_accepted_draft_tokens"] / max(counts["num_draft_tokens"], 1),
            "share_of_steps_with_drafts": counts["num_draft_steps"] / counts["num_steps"],
            **counts,
        }

    def _send(self, number: int, task: Task) -> Turn:
        begin = len(task.prompt)
        self._runner.scripts[number] = dict(enumerate(task.reply, begin))
        params = SamplingParams(max_tokens=len(task.reply), temperature=0.0, seed=number, ignore_eos=True)
        (turn,) = self._engine.submit([TurnSpec(task.prompt, params)])
        return turn


def measure(
    config: EngineConfig, sets: dict[str, list[Task]], num_users: Sequence[int]
) -> tuple[Figures, int]:
    """Measure one engine; returns its figures by set and users, and the number of wrong replies."""
    wrapped: list[ScriptedRunner] = []

    def wrap(runner: Any) -> Any:
        wrapped.append(ScriptedRunner(runner))
        return wrapped[0]

    parts = open_parts(config, wrap=wrap)
    load = Load(parts.engine, wrapped[0])
    figures: Figures = {}
    load.measure(next(iter(sets.values()))[:2], 1)  # warms up
    num_compilations = parts.runner.num_compilations
    for name, tasks in sets.items():
        for users in num_users:
            figures.setdefault(name, {})[str(users)] = load.measure(tasks, users)
    figures["num_compilations_while_serving"] = parts.runner.num_compilations - num_compilations
    parts.engine.check_integrity()
    parts.engine.close()
    return figures, load.num_wrong


def main() -> int:
    num_users = numbers("--users", FLAGS.users)
    model, context_tokens = model_limits()
    max_prompt = min(FLAGS.max_prompt_tokens, context_tokens - FLAGS.max_reply_tokens - 1)
    config = sized_config(num_users, max_prompt)
    tokenizer = learned_tokenizer(model.vocab_size, _ROOT)
    encode = functools.partial(tokenizer.encode, add_bos=False)
    pairs = {name: list(edits(_ROOT, FLAGS.num_turns, write)) for name, write in EDITS.items()}
    pairs["pages"] = list(pages(_ROOT, FLAGS.num_turns))
    if FLAGS.chats:
        pairs["chats"] = list(chats(Path(FLAGS.chats), FLAGS.num_turns))
    limits = {"max_prompt": max_prompt, "max_reply": FLAGS.max_reply_tokens}
    sets = {name: encoded(found, encode, **limits) for name, found in pairs.items()}
    sets = {name: tasks for name, tasks in sets.items() if tasks}
    if not sets:
        raise ConfigError("--max_prompt_tokens", max_prompt, "at least the tokens of one of the made prompts")
    figures, num_wrong = {}, 0
    for option in (_WITHOUT, _WITH):
        figures[option], wrong = measure(with_option(config, option), sets, num_users)
        num_wrong += wrong
        gc.collect()  # the device memory of the engine that is closed
        print(f"speculation={option}: measured, {wrong} wrong replies", flush=True)
    rows = []
    for name in sets:
        for users in map(str, num_users):
            off, on = (figures[option][name][users] for option in (_WITHOUT, _WITH))
            rates = [one["user_tokens_per_s"]["median"] for one in (off, on)]
            shown = [on[key] for key in ("tokens_per_draft", "share_held", "share_of_steps_with_drafts")]
            rows.append([name, int(users), *rates, rates[1] / rates[0], *shown])
    header = ["set", "users", "tokens/s, off", "with", "ratio", "tokens/draft", "held", "steps with drafts"]
    print(table(header, rows))
    document = {
        "model": FLAGS.model,
        "dtype": FLAGS.dtype,
        "config": dataclasses.asdict(config),
        "num_wrong_replies": num_wrong,
        "figures": figures,
    }
    print_document(json_line("drafts", document, units={"*_per_s": "1/s"}, device=device_name()))
    return EXIT_FAILED if num_wrong else 0


def define_flags() -> None:
    flags.DEFINE_list("users", ["1", "8"], "Numbers of users at a time.")
    flags.DEFINE_integer("num_turns", 24, "Most turns of each set.", lower_bound=1)
    flags.DEFINE_integer(
        "max_prompt_tokens", 4096, "The longest prompt; longer ones are left out.", lower_bound=1
    )
    flags.DEFINE_integer("max_reply_tokens", 768, "The longest reply; longer ones are cut.", lower_bound=2)
    flags.DEFINE_string("chats", None, "File of dialogues, JSON lines, perhaps compressed by gzip.")
    define_engine_flags(model=TINY_MODEL)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
