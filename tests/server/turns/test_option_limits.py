"""Options that are lists have limits on their lengths, which errors name on every route."""

from __future__ import annotations

import pytest

from pensieve_jax.core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIASED_IDS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from pensieve_jax.server.app import ROUTES
from tests.server.fakes import MODEL, Harness, ask

MESSAGES = {"messages": [{"role": "user", "content": "Hello"}]}
BODIES = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"prompt": "Hello"},
    "/v1/messages": {**MESSAGES, "max_tokens": 5},
}
IDS = MAX_ALLOWED_TOKEN_IDS
CASES = {
    "allowed": ("allowed_token_ids", [5] * (IDS + 1), f"{IDS + 1} ids", f"at most {IDS} ids"),
    "bias": (
        *("logit_bias", {str(index): 1 for index in range(MAX_BIASED_IDS + 1)}),
        *(f"{MAX_BIASED_IDS + 1} ids", f"at most {MAX_BIASED_IDS} ids"),
    ),
    "words": (
        *("bad_words", ["a"] * (MAX_BAD_WORDS + 1)),
        *(f"{MAX_BAD_WORDS + 1} strings", f"at most {MAX_BAD_WORDS} strings"),
    ),
    "word": (
        *("bad_words", ["a" * (MAX_BAD_WORD_CHARACTERS + 1)]),
        *(f"{MAX_BAD_WORD_CHARACTERS + 1} characters", f"at most {MAX_BAD_WORD_CHARACTERS} characters"),
    ),
    "stops": (
        *("stop", ["a"] * (MAX_STOP_STRINGS + 1)),
        *(f"{MAX_STOP_STRINGS + 1} strings", f"at most {MAX_STOP_STRINGS} strings"),
    ),
    "stop": (
        *("stop", ["a" * (MAX_STOP_CHARACTERS + 1)]),
        *(f"{MAX_STOP_CHARACTERS + 1} characters", f"at most {MAX_STOP_CHARACTERS} characters"),
    ),
    "stop ids": (
        *("stop_token_ids", [5] * (MAX_STOP_TOKEN_IDS + 1)),
        *(f"{MAX_STOP_TOKEN_IDS + 1} ids", f"at most {MAX_STOP_TOKEN_IDS} ids"),
    ),
}


ROUTES_OF = [
    (path, *case) for path in BODIES for case in CASES.values() if path != "/v1/messages" or case[0] == "stop"
]


@pytest.mark.parametrize(("path", "field", "value", "given", "limit"), ROUTES_OF)
def test_an_option_that_is_too_long_is_refused_with_its_limit(path, field, value, given, limit):
    harness = Harness(ROUTES)
    name = "stop_sequences" if field == "stop" and path == "/v1/messages" else field
    status, body = ask(harness, "POST", path, {"model": MODEL, **BODIES[path], name: value})
    message = body["error"]["message"]
    assert status == 400 and name in message and given in message and limit in message, message
    assert len(message) < 200 and not harness.engine.turns
