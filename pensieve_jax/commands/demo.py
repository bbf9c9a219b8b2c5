"""Conversations that lose part of their state and answer as if they had not.

    pensieve demo
    pensieve demo --details    # every turn: what was said, where its state was, what it took

Eight conversations of six turns share a system prompt and take turns on memory too small for them all: a few
device pages, and a few more in host memory. Idle chunks are copied out ahead of time and copied back when
their conversation returns; what fits into neither tier is dropped, leading chunks first, and recomputed; a
running request that finds no page is suspended and goes on later. Whoever tells something in the first turn
asks for it in the last one. The same turns run once more by an engine that keeps no state, to see what state
saved. Then every turn is replayed by the dense reference: the model over the whole token sequence, with no
pages, no scheduler and no kernel. In float32 each token must be the same. Exit status 1 if one is not, or if
something of the above did not happen.
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
from pensieve_jax.commands.demo_screen import (
    DemoTurn,
    Served,
    introduction,
    movements,
    num_recalled,
    picture,
    savings,
    transcript,
    usage_table,
)
from pensieve_jax.commands.engine_flags import CACHE_DIR, COMPILATION_CACHE_HELP, define_model_flag
from pensieve_jax.commands.launch import EXIT_FAILED
from pensieve_jax.commands.words import SMALL_MODEL
from pensieve_jax.config import POLICIES
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_jax.model_source import DEFAULT_MODEL, resolve_model
from pensieve_jax.text import ChatFormat, EarlierTurn

FLAGS = flags.FLAGS
flags.disclaim_key_flags()


def config(*, stateful: bool = True) -> EngineConfig:
    """An engine with far fewer pages than the conversations fill in the end.

    Nothing is kept in reserve for who runs already: replies are short, and nobody would be suspended. One
    that keeps no state runs the same steps, which are compiled once for both.
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
    """Run all conversations, a turn of each at a time.

    Raises ChatTemplateError or TokenizerMissingError for a model that is none for chats.
    """
    turns: list[DemoTurn] = []
    template = ChatFormat(llm.tokenizer)
    names = list(CONVERSATIONS)
    params = [script.params for script in CONVERSATIONS.values()]
    system = {"role": "system", "content": SYSTEM_PROMPT}
    earlier: dict[str, list[EarlierTurn]] = {name: [] for name in names}
    for index in range(max(len(script.messages) for script in CONVERSATIONS.values())):
        said = [CONVERSATIONS[name].messages[index] for name in names]
        messages = [[*([] if index else [system]), {"role": "user", "content": text}] for text in said]
        prompts = [
            template.turn_token_ids(earlier[name], one) for name, one in zip(names, messages, strict=True)
        ]
        shared = [] if index else common_beginning(prompts)
        tiers = [tuple(chunk.tier for chunk in llm.explain(name).chunks) if index else () for name in names]
        histories = [tuple(llm.history(name).token_ids.tolist()) if index else () for name in names]
        outputs = llm.generate(
            [ids[len(shared) :] for ids in prompts],
            params,
            conversation_ids=names,
            prefix=llm.share_prefix(shared) if shared else None,
        )
        for name, text, sent, history, ids, output, found in zip(
            names, said, messages, histories, prompts, outputs, tiers, strict=True
        ):
            params_of = CONVERSATIONS[name].params
            turns.append(DemoTurn(name, index + 1, text, history, tuple(ids), params_of, output, found))
            earlier[name].append(EarlierTurn(sent, output.text, output.token_ids, output.finish_reason))
    return turns


def common_beginning(prompts: Sequence[Sequence[int]]) -> list[int]:
    """What they all begin with: the system prompt as the template writes it."""
    columns = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False))
    return [ids[0] for ids in columns]


def replay(model: str, turns: Sequence[DemoTurn]) -> tuple[list[bool], float]:
    """Whether each turn's tokens are the dense reference's, and the smallest margin of any choice."""
    parts = load_model(resolve_model(model), dtype="float32", mesh=make_mesh(1))
    # Turns are short: less is computed for nothing than every length would take to compile.
    reference = DenseReference(parts, min_padded_tokens=256)
    equal, smallest = [], np.inf
    for turn in tqdm(turns, desc="replaying", disable=None, leave=False):
        token_ids = turn.output.token_ids
        found = reference.replay_turn(
            turn.history_ids, turn.prompt_ids, token_ids, turn.params, turn.output.seed
        )
        equal.append(found.token_ids.tolist() == list(token_ids))
        smallest = min(smallest, float(found.margins.min()))
    return equal, smallest


def check_happenings(turns: Sequence[DemoTurn]) -> bool:
    """Say how many turns were swapped in, recomputed and suspended; False if one of these never happened."""
    usages = [turn.output.usage for turn in turns]
    numbers = {
        "swapped in": sum(usage.swapped_in_tokens > 0 for usage in usages),
        "recomputed": sum(usage.recomputed_tokens > 0 for usage in usages),
        "suspended for want of memory": sum(usage.num_suspensions > 0 for usage in usages),
    }
    counts = ", ".join(f"{what}: {number}" for what, number in numbers.items())
    print(f"Of {len(turns)} turns, {counts}.")
    for what, number in numbers.items():
        if not number:
            print(f"nothing {what}: give other --gpu_pages or --cpu_pages")
    return all(numbers.values())


def main() -> int:
    """Serve with state and without, replay and compare; the exit status."""
    if FLAGS.model == DEFAULT_MODEL:
        print(SMALL_MODEL, flush=True)
    kept, stats = run(stateful=True)
    lost, _ = run(stateful=False)
    equal, margin = replay(FLAGS.model, kept.turns)
    turns = kept.turns
    if FLAGS.details:
        print(f"\n{transcript(turns)}\n{usage_table(turns, equal)}\n\n{movements(stats)}")
        print(f"The closest choice between two tokens was {margin:.2g} apart.")
    num_filled = sum(-(-len(t.history_ids + t.prompt_ids + t.output.token_ids) // 32) for t in turns[-8:])
    print(introduction(FLAGS.gpu_pages + FLAGS.cpu_pages, num_filled))
    print(f"{picture(turns)}\n\n{savings(kept, lost)}")
    print(f"{num_recalled(turns)} of {len(CONVERSATIONS)} last replies hold what was told in the first turn.")
    all_happened = check_happenings(turns)
    hint = "" if FLAGS.details else " (--details shows all turns)"
    print(f"Compared token by token with a dense model{hint}:")
    for turn, is_equal in zip(turns, equal, strict=True):
        if not is_equal:
            print(f"turn {turn.turn} of {turn.conversation_id} differs from the dense reference")
    print(f"{sum(equal)} of {len(turns)} turns equal")
    return 0 if all_happened and all(equal) else EXIT_FAILED


def run(*, stateful: bool) -> tuple[Served, dict[str, int | float]]:
    """All turns by an engine that keeps state, or by one that does not, and its counters."""
    with LLM(
        FLAGS.model, dtype="float32", config=config(stateful=stateful), progress=sys.stderr.isatty()
    ) as llm:
        start_s = time.perf_counter()
        try:
            turns = serve(llm)
        except ContextLengthError as error:
            room = f"{llm.engine.limits.max_context_tokens:,} tokens"
            limit = f"more, as conversations outgrow the {room} that fit"
            raise ConfigError(
                "--gpu_pages", FLAGS.gpu_pages, limit, "the model needs the positions, too"
            ) from error
        return Served(turns, time.perf_counter() - start_s), llm.stats()


def define_flags() -> None:
    """Define the command-line flags of `pensieve demo`."""
    define_model_flag()
    flags.DEFINE_bool("details", False, "Show every turn: what was said, and where its state was.")
    flags.DEFINE_integer("gpu_pages", 16, "Pages of device memory, of 32 tokens each.")
    flags.DEFINE_integer("cpu_pages", 12, "Pages of host memory beside them.")
    flags.DEFINE_enum("policy", "retention", POLICIES, "Whose state leaves a tier first.")
    flags.DEFINE_string("compilation_cache_dir", str(CACHE_DIR), COMPILATION_CACHE_HELP)
