"""Two ways to serve the load: the simulated engine in virtual time, and a server over HTTP in real time.

Owns: requests on their way, and their times.
Does not know: what is reported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from pensieve_jax import EngineConfig
from pensieve_lab.experiments.recompute import cost_model
from pensieve_lab.head_of_line.load import Sent, Served
from pensieve_lab.serving.http_client import HttpClient
from pensieve_lab.serving.served import ServedProcess
from pensieve_lab.simulator import DeviceProfile, Scenario, simulate
from pensieve_lab.workload import ConversationTrace, Session, TurnTrace

_MAX_TOKEN_ID = 250  # every tokenizer has these ids


def serve_simulated(
    sent: Sequence[Sent], config: EngineConfig, profile: DeviceProfile, max_context_tokens: int
) -> list[Served]:
    """Serve requests on a simulated device until the last is answered."""
    scenario = Scenario(
        config=config,
        profile=profile,
        cost_model=cost_model(profile, config.cache.chunk_tokens, max_context_tokens),
        max_context_tokens=max_context_tokens,
    )
    by_id = {str(number): one for number, one in enumerate(sent)}
    sessions = [
        Session(
            ConversationTrace(name, (TurnTrace(one.prompt_tokens, one.output_tokens),)), one.arrival_s, ()
        )
        for name, one in by_id.items()
    ]
    return [
        Served(
            by_id[answer.turn.conversation_id],
            answer.first_token_s,
            answer.end_s,
            answer.usage.num_suspensions,
        )
        for answer in simulate(scenario, sessions).answers
    ]


def serve_http(sent: Sequence[Sent], server: ServedProcess, model: str, seed: int) -> list[Served]:
    """Send requests to a server at their times; raises HttpError if one is refused."""
    return asyncio.run(_serve_http(sent, server, model, seed))


async def _serve_http(sent: Sequence[Sent], server: ServedProcess, model: str, seed: int) -> list[Served]:
    client = HttpClient(server.host, server.port)
    prompts = np.random.default_rng(seed)
    start_s = time.perf_counter()

    async def serve(one: Sent, token_ids: list[int]) -> Served:
        await asyncio.sleep(one.arrival_s - (time.perf_counter() - start_s))
        body = {
            "model": model,
            "prompt": token_ids,
            "max_tokens": one.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        timing = await client.post("/v1/completions", body)
        return Served(one, timing.first_s - start_s, timing.end_s - start_s, -1)

    work = [serve(one, prompts.integers(3, _MAX_TOKEN_ID, one.prompt_tokens).tolist()) for one in sent]
    try:
        return list(await asyncio.gather(*work))
    finally:
        await client.close()
