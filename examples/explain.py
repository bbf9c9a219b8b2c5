"""Explain why a chunk of KV cache was dropped: eight conversations share too few pages.

    python examples/explain.py

To drop less, give the engine more pages, or host memory for idle conversations (`cpu_pages`).
"""

from pensieve_jax import LLM, CacheConfig, EngineConfig, RunnerConfig, SamplingParams

# Too small on purpose: 12 pages of 32 tokens, and no host memory.
CONFIG = EngineConfig(
    cache=CacheConfig(gpu_pages=12),
    runner=RunnerConfig(compilation_cache_dir="compiled"),
)
STORY = "Hi! My name is Ada. I live in Paris, I have a dog, and I like tea. Hello again, and good morning!"


def main() -> None:
    """Fill the memory, look at the first conversation, and return to it."""
    params = SamplingParams(max_tokens=32, temperature=0.0)
    with LLM("chat", config=CONFIG) as llm:
        for number in range(8):
            llm.chat([{"role": "user", "content": STORY}], params, conversation_id=f"user-{number}")
        explanation = llm.explain("user-0")
        print(explanation)
        for chunk in explanation.chunks:
            if chunk.drop is not None:
                print(f"tokens {chunk.start} to {chunk.end}: {chunk.drop.reason.name}")
        question = [{"role": "user", "content": "What is my name?"}]
        reply = llm.chat(question, params, conversation_id="user-0")
        print(f"{reply.text} ({reply.usage.recomputed_tokens} tokens recomputed)")


if __name__ == "__main__":
    main()
