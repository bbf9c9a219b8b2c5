"""Conversations that lose part of their state and answer as if they had not.

    pensieve demo

Eight conversations of six turns share a system prompt and take turns on memory too small for them all: a few
device pages, and a few more in host memory. Idle chunks are copied out ahead of time and copied back when
their conversation returns; what fits into neither tier is dropped, leading chunks first, and recomputed; a
running request that finds no page is suspended and goes on later. Whoever tells something in the first turn
asks for it in the last one. Then every turn is replayed by the dense reference: the model over the whole
token sequence, with no pages, no scheduler and no kernel. In float32 each token must be the same. Exit status
1 if one is not, or if something of the above did not happen.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags
from tqdm import tqdm

from model_defs import load_model, make_mesh
from pensieve_jax import (
    LLM,
    CacheConfig,
    EngineConfig,
    Output,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
)
from pensieve_jax.assembly import resolve_model
from pensieve_jax.commands.demo_conversations import CONVERSATIONS, SYSTEM_PROMPT
from pensieve_jax.commands.engine_flags import define_model_flag
from pensieve_jax.commands.launch import EXIT_FAILED, one_line
from pensieve_jax.commands.report import table
from pensieve_jax.config import POLICIES
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_jax.text import ChatFormat, EarlierTurn

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
INTRODUCTION = """\
Eight people tell something about themselves and ask for it five turns later. Meanwhile the state of each
conversation makes room for that of the others: it is swapped out and in again, or dropped and recomputed.
In brackets is where it was; the last token of a history has no state yet. The model is a small one, made for
trying the engine: not all it says makes sense, but all of it is what it says without losing state.
"""


class DemoTurn(NamedTuple):
    """A turn that was served, and what it takes to replay it."""

    conversation_id: str
    turn: int
    prompt: str
    history_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output: Output


def config() -> EngineConfig:
    """An engine with far fewer pages than the conversations fill in the end.

    Nothing is kept in reserve for who runs already: replies are short, and nobody would be suspended.
    """
    return EngineConfig(
        cache=CacheConfig(
            gpu_pages=FLAGS.gpu_pages, cpu_pages=FLAGS.cpu_pages, policy=FLAGS.policy, reserve_fraction=0.0
        ),
        scheduler=SchedulerConfig(max_num_running=8, max_num_batched_tokens=128, token_buckets=(8, 128)),
        runner=RunnerConfig(max_logprobs=1, max_num_staged_pages=8),
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
        histories = [tuple(llm.history(name).token_ids.tolist()) if index else () for name in names]
        outputs = llm.generate(
            [ids[len(shared) :] for ids in prompts],
            params,
            conversation_ids=names,
            prefix=llm.share_prefix(shared) if shared else None,
        )
        for name, text, sent, history, ids, output in zip(
            names, said, messages, histories, prompts, outputs, strict=True
        ):
            turns.append(
                DemoTurn(name, index + 1, text, history, tuple(ids), CONVERSATIONS[name].params, output)
            )
            earlier[name].append(EarlierTurn(sent, output.text, output.token_ids, output.finish_reason))
    return turns


def common_beginning(prompts: Sequence[Sequence[int]]) -> list[int]:
    """What they all begin with: the system prompt as the template writes it."""
    columns = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False))
    return [ids[0] for ids in columns]


def replay(model: str, turns: Sequence[DemoTurn]) -> tuple[list[bool], float]:
    """Whether each turn's tokens are the dense reference's, and the smallest margin of any choice."""
    reference = DenseReference(load_model(resolve_model(model), dtype="float32", mesh=make_mesh(1)))
    equal, smallest = [], np.inf
    for turn in tqdm(turns, desc="replaying", disable=None, leave=False):
        token_ids = turn.output.token_ids
        found = reference.replay_turn(
            turn.history_ids, turn.prompt_ids, token_ids, turn.params, turn.output.seed
        )
        equal.append(found.token_ids.tolist() == list(token_ids))
        smallest = min(smallest, float(found.margins.min()))
    return equal, smallest


def print_conversations(turns: Sequence[DemoTurn]) -> None:
    """What was said and where the state was by then, one conversation after the other.

    Ends with how much of what was told came back.
    """
    num_recalled = 0
    for name, script in CONVERSATIONS.items():
        for turn in turns:
            if turn.conversation_id == name:
                print(f"{name:>9}> {turn.prompt}")
                if turn.history_ids:
                    print(f"           ({whereabouts(turn)})")
                print(f"assistant> {one_line(turn.output.text, 200)}")
                num_recalled += turn.turn == len(script.messages) and script.told in turn.output.text
        print()
    print(f"{num_recalled} of {len(CONVERSATIONS)} last replies hold what was told in the first turn.")


def whereabouts(turn: DemoTurn) -> str:
    """Where the state of a turn's history was; its last token has none before the turn."""
    usage = turn.output.usage
    parts = {
        "on the device": usage.reused_gpu_tokens,
        "swapped in": usage.swapped_in_tokens,
        "recomputed": usage.recomputed_tokens,
    }
    found = ", ".join(f"{number} {where}" for where, number in parts.items() if number)
    return f"{len(turn.history_ids)} tokens of history: {found}"


def usage_table(turns: Sequence[DemoTurn], equal: Sequence[bool]) -> str:
    """Where the tokens of every turn came from, and whether what came out is the dense reference's."""
    columns = ["conversation", "turn", "history", "prompt", "reused", "swapped in", "recomputed", "prefilled"]
    columns += ["output", "suspensions", "equal"]
    rows = []
    for turn, is_equal in zip(turns, equal, strict=True):
        usage = turn.output.usage
        rows.append(
            [
                turn.conversation_id,
                turn.turn,
                len(turn.history_ids),
                usage.prompt_tokens,
                usage.reused_gpu_tokens,
                usage.swapped_in_tokens,
                usage.recomputed_tokens,
                usage.prefilled_tokens,
                usage.output_tokens,
                usage.num_suspensions,
                "yes" if is_equal else "NO",
            ]
        )
    return table(columns, rows)


def check_happenings(turns: Sequence[DemoTurn]) -> bool:
    """Say how many turns were swapped in, recomputed and suspended; False if one of these never happened."""
    usages = [turn.output.usage for turn in turns]
    numbers = {
        "swapped something in": sum(usage.swapped_in_tokens > 0 for usage in usages),
        "recomputed something": sum(usage.recomputed_tokens > 0 for usage in usages),
        "were suspended": sum(usage.num_suspensions > 0 for usage in usages),
    }
    print(
        f"Of {len(turns)} turns, " + ", ".join(f"{number} {what}" for what, number in numbers.items()) + "."
    )
    for what, number in numbers.items():
        if not number:
            print(f"none {what}: give other --gpu_pages or --cpu_pages")
    return all(numbers.values())


def print_movements(stats: Mapping[str, int | float]) -> None:
    """What the tiers did, in a few lines."""
    print(f"{FLAGS.gpu_pages} pages of 32 tokens on the device, {FLAGS.cpu_pages} in host memory.")
    for way, chunks in (("out", "num_swapped_out_chunks"), ("in", "num_swapped_in_chunks")):
        num_bytes = f"{stats[f'swapped_{way}_bytes'] / 1e6:.2f} MB"
        print(
            f"Swapped {way}: {stats[chunks]} chunks, {num_bytes} in {stats[f'num_swap_{way}_copies']} copies."
        )
    print(
        f"Dropped: {stats['num_dropped_chunks']} chunks. Suspended: {stats['num_suspensions']} times. "
        f"History found on the device: {stats['gpu_hit_rate']:.0%}, in host memory: "
        f"{stats['cpu_hit_rate']:.0%}."
    )


def main() -> int:
    """Serve, replay and compare; the exit status."""
    start_s = time.perf_counter()
    print(INTRODUCTION, flush=True)
    with LLM(FLAGS.model, dtype="float32", config=config(), progress=sys.stderr.isatty()) as llm:
        ready_s = time.perf_counter()
        turns = serve(llm)
        stats = llm.stats()
    served_s = time.perf_counter()
    print_conversations(turns)
    equal, margin = replay(FLAGS.model, turns)
    replayed_s = time.perf_counter()
    print(
        "\nWhere the tokens of every turn came from, and whether the reply equals the dense reference's; "
        "the first\nturns reuse the system prompt that they share:"
    )
    print(f"{usage_table(turns, equal)}\n")
    print_movements(stats)
    all_happened = check_happenings(turns)
    print(
        f"compiling took {ready_s - start_s:.1f} s, serving {served_s - ready_s:.1f} s, replaying "
        f"{replayed_s - served_s:.1f} s; the closest choice between two tokens was {margin:.2g} apart"
    )
    for turn, is_equal in zip(turns, equal, strict=True):
        if not is_equal:
            print(f"turn {turn.turn} of {turn.conversation_id} differs from the dense reference")
    print(f"{sum(equal)} of {len(turns)} turns equal")
    return 0 if all_happened and all(equal) else EXIT_FAILED


def define_flags() -> None:
    """The command line."""
    define_model_flag()
    flags.DEFINE_integer("gpu_pages", 16, "Pages of device memory, of 32 tokens each.")
    flags.DEFINE_integer("cpu_pages", 12, "Pages of host memory beside them.")
    flags.DEFINE_enum("policy", "retention", POLICIES, "Whose state leaves a tier first.")
