"""Processes for long texts and bodies: they read as the server does, and their death ends one request."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import closing

import pytest

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.server.http.bodies import decode_body
from pensieve_jax.server.http.body_values import MAX_VALUES
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.text_processes import NUM_PROCESSES, TextProcesses
from pensieve_jax.server.openai.completions import CompletionBody
from pensieve_jax.server.openai.schemas import ChatBody
from pensieve_jax.text import byte_tokenizer
from tests.deadlines import TIMEOUT_S

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def texts():
    with closing(TextProcesses(TOKENIZER.as_json(), time_limit_s=TIMEOUT_S)) as texts:
        yield texts


@pytest.mark.parametrize("text", ["", "Hello \u00e9\U0001f600 there. " * 100, "<|end|>a"])
def test_a_text_has_the_ids_and_offsets_that_it_has_here(texts, text):
    assert texts.encode(text) == TOKENIZER.encode(text, add_bos=False)
    assert texts.offsets(text) == TOKENIZER.offsets(text)


def test_the_tokenizer_sends_its_long_texts_there():
    tokenizer, sent = byte_tokenizer(), []

    class Recorded:
        min_characters = 10

        def encode(self, text):
            sent.append(text)
            return TOKENIZER.encode(text, add_bos=False)

        offsets = encode

    tokenizer.long_texts = Recorded()
    for text in ("a" * 3, "b" * 10):
        assert tokenizer.encode(text, add_bos=True) == TOKENIZER.encode(text, add_bos=True)
        tokenizer.encode_after(None, text)
        tokenizer.offsets(text)
    assert len(sent) == 3 and all(text.endswith("b" * 10) for text in sent)


def test_a_lone_surrogate_gets_the_same_error(texts):
    tokenizer = byte_tokenizer()
    tokenizer.long_texts = texts
    with pytest.raises(InvalidRequestError, match="lone surrogates"):
        tokenizer.encode("\ud800" + "a" * 2**18, add_bos=False)


BODIES = [
    (ChatBody, {"messages": [{"role": "user", "content": "a" * 1000}], "temperature": 0.5, "seed": -1}),
    (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "x": [[]]}),
    (CompletionBody, {"prompt": [[1, 2], [2**64]], "logit_bias": {"5": 1.0}}),
    (CompletionBody, {"prompt": 5}),
    (CompletionBody, {"prompt": "a", "suffix": "b"}),
]


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_a_body_is_decoded_as_here(texts, kind, body):
    raw = json.dumps(body).encode()
    try:
        expected = decode_body(raw, kind)
    except ApiError as error:
        with pytest.raises(ApiError) as caught:
            texts.decode_body(raw, kind, "auto")
        assert (caught.value.status, caught.value.error) == (error.status, error.error)
    else:
        assert texts.decode_body(raw, kind, "auto") == expected


def test_a_body_of_too_many_values_is_refused(texts):
    raw = json.dumps({"prompt": "a", "stop": ["s"] * (MAX_VALUES + 1)}).encode()
    with pytest.raises(ApiError, match="must have at most 250,000"):
        texts.decode_body(raw, CompletionBody, "auto")


def test_a_request_that_takes_too_long_ends_alone():
    with closing(TextProcesses(TOKENIZER.as_json(), time_limit_s=0.0)) as texts:
        for _ in range(NUM_PROCESSES + 1):
            with pytest.raises(ApiError, match="takes more than 0 s to read") as caught:
                texts.encode("a" * 1_000_000)
        assert (caught.value.status, caught.value.code) == (413, "request_too_large")
        texts._time_limit_s = TIMEOUT_S
        assert texts.encode("ab") == TOKENIZER.encode("ab", add_bos=False)


def test_a_request_that_takes_too_much_memory_ends_alone():
    with closing(
        TextProcesses(TOKENIZER.as_json(), time_limit_s=TIMEOUT_S, memory_bytes=64 * 2**20)
    ) as texts:
        for _ in range(NUM_PROCESSES + 1):
            with pytest.raises(ApiError, match="takes more than 64 MiB to read"):
                texts.encode("a" * 4_000_000)
            assert texts.encode("ab") == TOKENIZER.encode("ab", add_bos=False)


def test_a_process_that_was_killed_is_replaced(texts):
    texts.encode("a")
    process = texts._idle.get()
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    texts._idle.put(process)
    assert texts.encode("a") == TOKENIZER.encode("a", add_bos=False)


def test_several_threads_share_the_processes(texts):
    found: list[list[int]] = []
    expected = TOKENIZER.encode("abc", add_bos=False)
    threads = [
        threading.Thread(target=lambda: found.append(texts.encode("abc"))) for _ in range(3 * NUM_PROCESSES)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert found == [expected] * len(threads)


def test_closing_ends_the_processes():
    texts = TextProcesses(TOKENIZER.as_json(), time_limit_s=TIMEOUT_S)
    texts.encode("a")
    process = texts._idle.get()
    texts._idle.put(process)
    texts.close()
    assert process._process.returncode == 0
