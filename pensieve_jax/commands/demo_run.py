"""Runs of the demonstration: the stateful and the stateless engine, and the dense reference.

Owns: the configuration of both engines, the order of turns, and the lines of progress.
Does not know: the output, or what must have happened.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence

import numpy as np
from absl import flags
from tqdm import tqdm

from model_defs import load_model, make_mesh
from pensieve_jax import (
    LLM,
    CacheConfig,
    ConfigError,
    ContextLengthError,
    EngineConfig,
    RunnerConfig,
    SchedulerConfig,
)
from pensieve_jax.commands.demo_conversations import CONVERSATIONS, SYSTEM_PROMPT
from pensieve_jax.commands.demo_screen import DemoRun, DemoTurn
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_jax.model_source import resolve_model
from pensieve_jax.text import ChatFormat, EarlierTurn

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
_TOLD_TURNS = 12  # replayed turns between two lines of progress


def run(*, stateful: bool) -> tuple[DemoRun, dict[str, int | float]]:
    """Run all turns in a stateful or a stateless engine; return them with its counters."""
    say_progress(f"starting the engine {'with' if stateful else 'without'} state; a first start compiles")
    with LLM(
        FLAGS.model, dtype="float32", config=config(stateful=stateful), progress=sys.stderr.isatty()
    ) as llm:
        start_s = time.perf_counter()
        try:
            turns = serve(llm)
        except ContextLengthError as error:
            room = f"{llm.engine.limits.max_context_tokens:,} tokens"
            limit = f"more, since the conversations exceed the {room} that fit"
            raise ConfigError(
                "--gpu_pages", FLAGS.gpu_pages, limit, "the model must have as many positions, too"
            ) from error
        return DemoRun(turns, time.perf_counter() - start_s), llm.stats()


def config(*, stateful: bool = True) -> EngineConfig:
    """Return the configuration of an engine with far fewer pages than the conversations need.

    It reserves no pages for running requests: replies are short, and with a reserve no request would be
    suspended. A stateless engine runs the same steps, which are compiled once for both.
    """
    return EngineConfig(
        stateful=stateful,
        cache=CacheConfig(
            gpu_pages=FLAGS.gpu_pages, cpu_pages=FLAGS.cpu_pages, policy=FLAGS.policy, reserve_fraction=0.0
        ),
        scheduler=SchedulerConfig(max_num_running=8, max_num_batched_tokens=128, token_buckets=(8, 128)),
        runner=RunnerConfig(
            max_logprobs=1,
            max_num_staged_pages=8,
            compilation_cache_dir=FLAGS.compilation_cache_dir or None,
        ),
    )


def serve(llm: LLM) -> list[DemoTurn]:
    """Run all conversations, one turn of each at a time.

    Raises:
      ChatTemplateError, TokenizerMissingError: the model is not a chat model.
    """
    turns: list[DemoTurn] = []
    template = ChatFormat(llm.tokenizer)
    names = list(CONVERSATIONS)
    params = [script.params for script in CONVERSATIONS.values()]
    system = {"role": "system", "content": SYSTEM_PROMPT}
    earlier: dict[str, list[EarlierTurn]] = {name: [] for name in names}
    num_rounds = max(len(script.messages) for script in CONVERSATIONS.values())
    for index in range(num_rounds):
        texts = [CONVERSATIONS[name].messages[index] for name in names]
        messages = [[*([] if index else [system]), {"role": "user", "content": text}] for text in texts]
        prompts: list[list[int]] = []
        histories: list[tuple[int, ...]] = []
        for name, one in zip(names, messages, strict=True):
            history = tuple(llm.history(name).token_ids.tolist()) if index else ()
            keep, ids = template.turn_prompt(earlier[name], history, one)
            histories.append(history[:keep])
            prompts.append(ids)
        shared = [] if index else common_beginning(prompts)
        tiers = [tuple(chunk.tier for chunk in llm.explain(name).chunks) if index else () for name in names]
        outputs = llm.chat(
            messages,
            params,
            conversation_ids=names,
            prefix=llm.share_prefix(shared) if shared else None,
        )
        for name, text, sent, history, ids, output, found in zip(
            names, texts, messages, histories, prompts, outputs, tiers, strict=True
        ):
            params_of = CONVERSATIONS[name].params
            turns.append(DemoTurn(name, index + 1, text, history, tuple(ids), params_of, output, found))
            num_tokens = len(history) + len(ids) + len(output.token_ids)
            earlier[name].append(EarlierTurn(sent, output.text, output.token_ids, num_tokens))
        say_progress(f"turn {index + 1} of {num_rounds} of {len(names)} conversations is answered")
    return turns


def replay(model: str, turns: Sequence[DemoTurn]) -> tuple[list[bool], float]:
    """Return whether each turn's tokens equal the dense reference's, and the smallest margin of a choice."""
    parts = load_model(resolve_model(model), dtype="float32", mesh=make_mesh(1))
    # Turns are short, so padding to 256 costs less than compiling every length.
    reference = DenseReference(parts, min_padded_tokens=256)
    equal, smallest = [], np.inf
    for number, turn in enumerate(tqdm(turns, desc="replaying", disable=None, leave=False), 1):
        token_ids = turn.output.token_ids
        found = reference.replay_turn(
            turn.history_ids, turn.prompt_ids, token_ids, turn.params, turn.output.seed
        )
        equal.append(found.token_ids.tolist() == list(token_ids))
        smallest = min(smallest, float(found.margins.min()))
        if number % _TOLD_TURNS == 0 or number == len(turns):
            say_progress(f"{number} of {len(turns)} turns are replayed by the dense model")
    return equal, smallest


def common_beginning(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the common prefix of all prompts: the system prompt in the chat template."""
    columns = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False))
    return [ids[0] for ids in columns]


def say_progress(text: str) -> None:
    """Print a line of progress where the output is not a terminal and shows no bar."""
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
