"""Chat in turns: each call sends the new message only, and a second run of this program still remembers.

python examples/chat.py
"""

from pensieve_jax import LLM, CacheConfig, EngineConfig, RunnerConfig, SamplingParams

CONFIG = EngineConfig(
    cache=CacheConfig(gpu_pages=256, cpu_pages=256),  # pages of device memory, and slots of host memory
    runner=RunnerConfig(compilation_cache_dir="compiled"),  # the next start loads what this one compiles
)


def main() -> None:
    """Tell a name if this conversation is new, and ask for it."""
    params = SamplingParams(max_tokens=64, temperature=0.0)
    with LLM("chat", config=CONFIG, history="chats.sqlite") as llm:
        is_new = all(one.conversation_id != "ada" for one in llm.conversations())
        questions = ["Hi! My name is Ada.", "What is my name?"] if is_new else ["What is my name?"]
        for question in questions:
            reply = llm.chat([{"role": "user", "content": question}], params, conversation_id="ada")
            usage = reply.usage
            print(f"> {question}\n{reply.text}")
            print(f"  reused {usage.reused_gpu_tokens}, recomputed {usage.recomputed_tokens} tokens")


if __name__ == "__main__":
    main()
