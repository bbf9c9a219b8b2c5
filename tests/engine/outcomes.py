"""Checks of one turn of a random scenario: its inputs, its output, its usage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pensieve_jax.cache import ChunkState
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.engine.turn import Turn
from tests.engine.oracles import Bench, TurnFacts, prompt_ids
from tests.engine.scenarios import PREFIX_LENS, Draft

COUNTED = (
    "reused_gpu_tokens",
    "swapped_in_tokens",
    "recomputed_tokens",
    "num_suspensions",
    "resume_recomputed_tokens",
    "resume_swapped_in_tokens",
)
TIERS = {
    ChunkState.DROPPED: "dropped",
    ChunkState.RESERVED: "dropped",
    ChunkState.ON_GPU: "gpu",
    ChunkState.COPYING_OUT: "gpu",
    ChunkState.ON_BOTH: "gpu",
    ChunkState.LEAVING: "cpu",
    ChunkState.ON_CPU: "cpu",
    ChunkState.COPYING_IN: "cpu",
}


@dataclass(frozen=True)
class Running:
    """A submitted turn and its facts."""

    turn: Turn
    facts: TurnFacts
    conversation_id: str | None


def facts_of(draft: Draft, history: tuple[int, ...], bench: Bench, max_total_tokens: int) -> TurnFacts:
    """Return the facts of a drafted turn, for a conversation with this history."""
    seed = draft.seed * (2**40 + 1)  # sets both words of the seed
    prefix_len = PREFIX_LENS[draft.prefix] if draft.prefix >= 0 and not history else 0
    prefix = prompt_ids(draft.prefix, prefix_len, bench.vocab_size) if prefix_len else ()
    is_scored = draft.seed % 4 == 1
    no_reply = draft.seed % 8 == 5 and not draft.min_tokens
    facts = TurnFacts(
        history=history,
        prompt=(*prefix, *prompt_ids(draft.seed, draft.prompt_len, bench.vocab_size)),
        params=SamplingParams(
            max_tokens=0 if no_reply else draft.max_tokens,
            min_tokens=draft.min_tokens,
            temperature=draft.temperature,
            top_k=draft.seed % 3 * 20,
            top_p=1.0 - draft.seed % 2 * 0.25,
            seed=seed,
            ignore_eos=draft.ending != "eos",
            logprobs=draft.seed % 4,
            prompt_logprobs=draft.seed // 8 % 3 if is_scored else None,
            **_options(draft.seed // 11 % 8, bench.vocab_size),
        ),
        seed=seed,
        max_total_tokens=max_total_tokens,
        num_prefix_tokens=prefix_len,
    )
    if draft.ending == "stop" and facts.max_output_len > 0:
        return replace(facts, params=replace(facts.params, stop_token_ids=(bench.stop_id(facts),)))
    return facts


def _options(kind: int, vocab_size: int) -> dict[str, Any]:
    """Return sampling options that adjust logits; half of the turns have none."""
    penalties = {"repetition_penalty": 1.25, "frequency_penalty": 0.5, "presence_penalty": -0.25}
    others = {
        "logit_bias": {1: -4.0, vocab_size - 1: 2.5},
        "allowed_token_ids": range(0, vocab_size, 3),
        "min_p": 0.03125,
    }
    return {
        4: penalties,
        5: {"frequency_penalty": 1.5},
        6: others,
        7: penalties | others,
    }.get(kind, {})


def check_output(running: Running, bench: Bench) -> None:
    """Assert that a turn ended as its parameters require."""
    output, facts = running.turn.output, running.facts
    assert output.conversation_id == running.conversation_id and output.seed == facts.seed
    facts.check_end(output.token_ids, output.finish_reason, bench.eos_token_ids)
    bench.check_logprobs(facts, output.logprobs)
    if facts.params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        bench.check_prompt(facts, output.prompt_logprobs)


def check_cancelled(running: Running, bench: Bench) -> None:
    """Assert that a cancelled turn had the beginning of its reply."""
    output = running.turn.output
    assert output.finish_reason == "cancelled"
    bench.check_tokens(running.facts, output.token_ids, whole=False)


def check_usage(running: Running, num_granted: int, num_copied: int | None, config: EngineConfig) -> None:
    """Assert that the counts add up, and that computed and copied-in tokens are counted as such.

    `num_granted` tokens entered the model for this turn, and `num_copied` of its history were copied in
    before it was admitted (None: unknown).
    """
    output, facts = running.turn.output, running.facts
    usage = output.usage
    assert usage.prompt_tokens == len(facts.prompt) and usage.output_tokens == len(output.token_ids)
    computed = usage.recomputed_tokens + usage.prefilled_tokens
    known = usage.reused_gpu_tokens + usage.swapped_in_tokens
    assert known + computed == len(facts.history) + len(facts.prompt), usage
    assert min(getattr(usage, name) for name in COUNTED) >= 0, usage
    assert usage.prefilled_tokens >= len(facts.prompt) - facts.num_prefix_tokens, usage
    # Of the history, only the last token was never computed before.
    assert usage.prefilled_tokens <= len(facts.prompt) + 1, usage
    assert config.stateful or known == 0, "the stateless baseline kept state"
    num_extra = num_granted - computed - usage.resume_recomputed_tokens - max(usage.output_tokens - 1, 0)
    # If an id ends the reply, the look-ahead step is discarded, as is the rest of a draft; an end by length
    # has none.
    num_allowed = 2 + config.scheduler.draft_limit if output.finish_reason == "stop" else 1
    assert num_extra in range(num_allowed), (num_extra, usage)
    assert num_copied in (usage.swapped_in_tokens, None), (num_copied, usage)
    assert usage.num_suspensions or not usage.resume_recomputed_tokens + usage.resume_swapped_in_tokens, usage


def mixture_of(turn: Turn) -> str:
    """Return the tiers of a new turn's history: "cpu + dropped + gpu", say."""
    tiers = {TIERS[chunk.state] for chunk in turn.request.sequence.chunks}
    return " + ".join(sorted(tiers)) or "nothing"
