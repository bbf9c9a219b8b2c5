"""Conversations that lose part of their state and answer as if they had not: what `make demo` runs.

Six conversations of four turns share a system prompt and take turns on memory too small for them all: a few
device pages, and a few more in host memory. Idle chunks are copied out ahead of time and copied back when
their conversation returns; what fits into neither tier is dropped, leading chunks first, and recomputed; a
running request that finds no page is suspended and goes on later. Then every turn is replayed by the dense
reference: the model over the whole token sequence, with no pages, no scheduler and no kernel. In float32
each token must be the same. Exit status 1 if one is not, or if something of the above did not happen.

The default model has random weights and a byte tokenizer: its replies are noise, printed escaped. Give
`--model` a real one to read sense.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags
from common.launch import EXIT_FAILED, one_line, run
from common.report import table
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
    UnknownConversationError,
)
from pensieve_jax.assembly import resolve_model
from pensieve_jax.config import POLICIES
from pensieve_jax.engine.dense_reference import DenseReference

FLAGS = flags.FLAGS
SYSTEM_PROMPT = "You answer in two short sentences, and you ask back when something is missing. "
GREEDY = SamplingParams(max_tokens=56, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=56, ignore_eos=True, temperature=0.8, top_p=0.95, seed=7)

CONVERSATIONS: dict[str, tuple[SamplingParams, tuple[str, ...]]] = {
    "ada": (
        GREEDY,
        (
            "I have three evenings to learn how to juggle. Where should I begin?",
            "Two balls feel fine now, but the third one always flies forward.",
            "Facing a wall helped. How do I keep going for longer than ten throws?",
            "Thank you! Which trick would impress my niece most on Sunday?",
        ),
    ),
    "boris": (
        SAMPLED,
        (
            "My sourdough starter smells of apples and does not rise. Is it dead?",
            "It is winter and the kitchen has seventeen degrees.",
            "I moved it next to the oven and it doubled overnight!",
            "Then I bake tomorrow. Give me the shortest recipe you have.",
        ),
    ),
    "chen": (
        GREEDY,
        (
            "Explain to a ten year old why the sea is salty but rivers are not.",
            "So do rivers carry salt as well, only less of it?",
            "And where does the water go, if the salt stays behind?",
            "She wants to try it in the kitchen. What do we need?",
        ),
    ),
    "dora": (
        SAMPLED,
        (
            "Plan a walk of two hours in a town I do not know, in the rain.",
            "I like old bridges, and I would rather not buy anything.",
            "One of them is closed. Is there a way around along the river?",
            "Make it a loop, so that I end up where I started.",
        ),
    ),
    "emil": (
        GREEDY,
        (
            "Here is my riddle: what has keys and opens no lock?",
            "Right, it was too easy. Now you: ask me one about time.",
            "An hourglass? Give me a hint, but a small one.",
            "I give up. Tell me, and explain why I should have known.",
        ),
    ),
    "fay": (
        SAMPLED,
        (
            "Write the first line of a story in which nobody speaks.",
            "Good. The second line must bring in a red umbrella.",
            "Now somebody loses it, and we must not learn how.",
            "End it in one more line, and make that line a question.",
        ),
    ),
}


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
    """An engine with far fewer pages than the conversations fill in the end."""
    return EngineConfig(
        cache=CacheConfig(gpu_pages=FLAGS.gpu_pages, cpu_pages=FLAGS.cpu_pages, policy=FLAGS.policy),
        scheduler=SchedulerConfig(max_num_running=8, max_num_batched_tokens=128, token_buckets=(8, 128)),
        runner=RunnerConfig(max_logprobs=1, max_num_staged_pages=8),
    )


def serve(llm: LLM) -> list[DemoTurn]:
    """Run all conversations, a turn of each at a time."""
    turns: list[DemoTurn] = []
    system_prompt = llm.share_prefix(SYSTEM_PROMPT)
    names = list(CONVERSATIONS)
    params = [CONVERSATIONS[name][0] for name in names]
    num_rounds = max(len(prompts) for _, prompts in CONVERSATIONS.values())
    for index in range(num_rounds):
        prompts = [CONVERSATIONS[name][1][index] for name in names]
        histories = [_token_ids(llm, name) for name in names]
        prefix = None if index else system_prompt
        outputs = llm.generate(prompts, params, conversation_ids=names, prefix=prefix)
        for name, prompt, history, one, output in zip(
            names, prompts, histories, params, outputs, strict=True
        ):
            prompt_ids = llm.history(name).turns[index].prompt_token_ids
            turns.append(DemoTurn(name, index + 1, prompt, history, prompt_ids, one, output))
    return turns


def _token_ids(llm: LLM, name: str) -> tuple[int, ...]:
    try:
        return tuple(llm.history(name).token_ids.tolist())
    except UnknownConversationError:
        return ()


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


def usage_table(turns: Sequence[DemoTurn]) -> str:
    """Where the tokens of every turn came from."""
    columns = ["conversation", "turn", "history", "prompt", "reused", "swapped in", "recomputed", "prefilled"]
    columns += ["output", "suspensions"]
    rows = []
    for turn in turns:
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
    start_s = time.perf_counter()
    with LLM(FLAGS.model, dtype="float32", config=config(), progress=sys.stderr.isatty()) as llm:
        ready_s = time.perf_counter()
        turns = serve(llm)
        stats = llm.stats()
    served_s = time.perf_counter()
    if FLAGS.model.startswith("random:"):
        print("The model has random weights: replies are noise, and bytes that are no text are escaped.")
    for turn in turns:
        print(f"{turn.conversation_id}[{turn.turn}] > {turn.prompt}")
        print(f"{turn.conversation_id}[{turn.turn}] < {one_line(turn.output.text, 96)}")
    print(
        "\nWhere the tokens of every turn came from; the first turns reuse the system prompt that they share:"
    )
    print(f"{usage_table(turns)}\n")
    print_movements(stats)
    all_happened = check_happenings(turns)

    equal, margin = replay(FLAGS.model, turns)
    replayed_s = time.perf_counter()
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
    flags.DEFINE_string("model", "random:llama-tiny", "A model with a tokenizer.")
    flags.DEFINE_integer("gpu_pages", 24, "Pages of device memory, of 32 tokens each.")
    flags.DEFINE_integer("cpu_pages", 20, "Pages of host memory beside them.")
    flags.DEFINE_enum("policy", "retention", POLICIES, "Whose state leaves a tier first.")


if __name__ == "__main__":
    define_flags()
    run(main)
