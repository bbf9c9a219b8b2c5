"""Use the openai client with a local server. Start it first: `pensieve serve --model=chat`.

python examples/openai_client.py [BASE_URL]
"""

import sys

import openai


def main(base_url: str) -> None:
    """Send a response, one behind it, and a stream."""
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        first = client.responses.create(model="chat", input="Hi! My name is Ada.", temperature=0)
        print(first.output_text)
        # Only the new message is sent and computed: the server has the KV cache of what came before.
        second = client.responses.create(
            model="chat", input="What is my name?", previous_response_id=first.id, temperature=0
        )
        print(second.output_text)
        if second.usage is not None:
            print(f"{second.usage.input_tokens_details.cached_tokens} tokens were cached")
        stream = client.responses.create(model="chat", input="Hello!", temperature=0, stream=True)
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
