"""A front end that waits to be killed: `python front.py HISTORY CACHE_DIR`. It prints its parent's data."""

from __future__ import annotations

import asyncio
import sys

from pensieve_jax import AsyncEngine, CacheConfig, EngineConfig, RunnerConfig, SamplingParams, SchedulerConfig

MODEL = "random:llama-tiny"


def config(compilation_cache: str) -> EngineConfig:
    """Return the configuration of the shared test model, so that it compiles once."""
    return EngineConfig(
        cache=CacheConfig(gpu_pages=24),
        scheduler=SchedulerConfig(max_num_running=8, max_num_batched_tokens=64, token_buckets=(64,)),
        runner=RunnerConfig(compilation_cache_dir=compilation_cache),
    )


async def main(history: str, compilation_cache: str) -> None:
    engine = AsyncEngine.start(
        MODEL, dtype="float32", history=history, config=config(compilation_cache), progress=False
    )
    async with engine:
        params = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
        await engine.submit([5, 6], params, conversation_id="ended").result()
        turn = engine.submit([5], SamplingParams(max_tokens=600, ignore_eos=True), conversation_id="running")
        await anext(aiter(turn))
        print(engine._handle.process.pid, "jax" in sys.modules, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
