"""Replies that ended with more than the client was sent: later turns have the text of the messages."""

from __future__ import annotations

import pytest

from tests.server.context.scenarios import assistant, output_of, tokenizer, user


def ended_by(resolved, text: str, *ids: int):
    """Commit a reply that ends with ids whose text its client was not sent."""
    return resolved.commit(output_of([*tokenizer().encode(text, add_bos=False), *ids], text))


STOP_IDS = {
    "a stop string": tokenizer().encode("STOP", add_bos=False),
    "a control token": [tokenizer()._backend.token_to_id("<|user|>")],
}


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("ending", STOP_IDS)
def test_later_turns_replace_text_that_the_client_was_not_sent(resolving, ending, by_id):
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=True)
    ended_by(first, "fine", tokenizer().eos_id)
    context = [user("hi"), assistant("fine"), user("and")]
    second = resolving.resolve("ann", context, epoch=1, durable=True)
    stopped = ended_by(second, "one", *STOP_IDS[ending])
    context += [assistant("one"), user("so")]
    if by_id:
        third = resolving.resolve_after("ann", second.node.turn_id, context[-1:], epoch=1, durable=True)
    else:
        third = resolving.resolve("ann", context, epoch=1, durable=True)
    assert third.parent.turn_id == second.node.turn_id and third.messages == (user("so"),)
    assert third.keep == stopped.num_tokens - len(STOP_IDS[ending])
    assert third.node.chain == resolving.resolve("ann", context, epoch=1, durable=True).node.chain
    written = tokenizer().decode_raw(third.prompt_token_ids)
    assert written == "<|end|><|user|>so<|end|><|assistant|>"
    ended_by(third, "fine", tokenizer().eos_id)
    fourth = resolving.resolve("ann", [*context, assistant("fine"), user("on")], epoch=1, durable=True)
    assert fourth.parent.turn_id == third.node.turn_id and fourth.keep == fourth.parent.num_tokens


def test_unsent_ids_that_equal_the_templates_ending_stay(resolving):
    """The text is the same either way, so the ids stay as they were sampled."""
    first = resolving.resolve("ann", [user("hi")], epoch=1, durable=True)
    ended_by(first, "one", *tokenizer().encode("<|end|>", add_bos=False))
    second = resolving.resolve("ann", [user("hi"), assistant("one"), user("so")], epoch=1, durable=True)
    assert second.parent.turn_id == first.node.turn_id and second.keep == second.parent.num_tokens
