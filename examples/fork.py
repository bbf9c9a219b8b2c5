"""Fork a conversation: both continuations share the KV cache of what they have in common.

python examples/fork.py
"""

from pensieve_jax import LLM, CacheConfig, EngineConfig, Output, RunnerConfig, SamplingParams

CONFIG = EngineConfig(
    cache=CacheConfig(gpu_pages=256),
    runner=RunnerConfig(compilation_cache_dir="compiled"),
)
PARAMS = SamplingParams(max_tokens=48, temperature=0.0)


def ask(llm: LLM, conversation_id: str, text: str) -> Output:
    """Send a message of a conversation, and print it with the reply."""
    reply = llm.chat([{"role": "user", "content": text}], PARAMS, conversation_id=conversation_id)
    print(f"{conversation_id}> {text}\n{reply.text}")
    return reply


def main() -> None:
    """Continue one conversation in two ways."""
    with LLM("chat", config=CONFIG) as llm:
        ask(llm, "original", "Hi! My name is Eve, and I live in Paris.")
        llm.fork("original", "copy")  # copies nothing; `num_tokens` forks at an earlier place
        ask(llm, "original", "What is my name?")
        usage = ask(llm, "copy", "Where do I live?").usage
        print(f"the copy reused {usage.reused_gpu_tokens} tokens that the original had computed")


if __name__ == "__main__":
    main()
