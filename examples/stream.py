"""Stream two replies at once: one loop runs the steps of all turns and prints what is new.

python examples/stream.py
"""

from pensieve_jax import LLM, CacheConfig, EngineConfig, RunnerConfig, SamplingParams

CONFIG = EngineConfig(
    cache=CacheConfig(gpu_pages=256),
    runner=RunnerConfig(compilation_cache_dir="compiled"),
)


def main() -> None:
    """Print one reply as it comes, and then two that are computed together."""
    params = SamplingParams(max_tokens=48, temperature=0.0)
    with LLM("chat", config=CONFIG) as llm:
        hello = [{"role": "user", "content": "Hello! My name is Bob."}]
        for delta in llm.stream_chat(hello, params, conversation_id="bob"):
            print(delta.text, end="", flush=True)
        print()
        questions = ["What is my name?", "Tell me a joke."]
        turns = llm.submit(
            [[{"role": "user", "content": question}] for question in questions],
            params,
            conversation_ids=["bob", "cleo"],
        )
        while llm.unfinished:
            llm.step()
            for name, turn in zip(("bob", "cleo"), turns, strict=True):
                news = turn.take_delta()
                if news is not None:
                    print(f"{name}: {news.text!r}")


if __name__ == "__main__":
    main()
