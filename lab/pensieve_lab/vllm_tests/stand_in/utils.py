"""In place of the `utils.py` of vLLM's tests: a server that runs already.

Owns: the clients of that server.
Does not know: the tests.
"""

from __future__ import annotations

import os
from typing import Any

import anthropic
import openai

ROCM_EXTRA_ARGS: list[str] = []
VLLM_PATH = "."


class RemoteOpenAIServer:
    """The server that the environment names, whatever model and arguments are asked for."""

    DUMMY_API_KEY = "none"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.url_root = os.environ["VLLM_TESTS_URL"]

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _arguments(self, path: str, given: dict[str, Any]) -> dict[str, Any]:
        fixed = {"base_url": self.url_for(path), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return {"timeout": 60, **fixed, **given}

    def get_client(self, **given: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._arguments("v1", given))

    def get_async_client(self, **given: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._arguments("v1", given))

    def get_client_anthropic(self, **given: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._arguments("", given))

    def get_async_client_anthropic(self, **given: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._arguments("", given))


def multi_gpu_only(**_: Any) -> Any:
    return lambda test: test


def requires_fp8(test: Any) -> Any:
    return test
