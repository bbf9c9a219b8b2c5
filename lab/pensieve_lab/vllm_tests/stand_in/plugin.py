"""In place of the `conftest.py` of vLLM's tests: empty packages for its imports, and a line for each result.

Owns: the packages that are imported empty, which of their names a test used, and the file of results.
Does not know: what a test checks.

An imported name is a class that takes any arguments, is false, and has any attribute. So a test that needs
only the server runs, and one that uses vLLM's classes fails and says which.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import requests

EMPTY = ("vllm", "torch", "tblib", "PIL", "cloudpickle", "fastapi", "schemathesis", "hypothesis", "datasets")
HTTP_CLIENTS = [
    importlib.import_module(name) for name in ("httpx", "httpx2") if importlib.util.find_spec(name)
]
FIRST_ERROR = 400
_used: list[str] = []
_errors: list[str] = []


class _Meta(type):
    """Makes a class have any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(f"{cls.__qualname__}.{name}")

    def __bool__(cls) -> bool:
        return False


class Anything(Exception, metaclass=_Meta):
    """Base of all names that are imported from an empty package."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _used.append(type(self).__qualname__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(f"{type(self).__qualname__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _named(name: str) -> type[Anything]:
    return _Meta(name, (Anything,), {"__qualname__": name})


class _EmptyModule(types.ModuleType):
    """Module that has any name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _get_tokenizer if name == "get_tokenizer" else _named(f"{self.__name__}.{name}")


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of empty packages."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name.partition(".")[0] in EMPTY:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _get_tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(os.environ["VLLM_TESTS_TOKENIZER"])


sys.meta_path.insert(0, _Empty())


def _note(method: object, url: object, status: int, text: str) -> None:
    if status >= FIRST_ERROR:
        _errors.append(f"{status} {method} {str(url).partition('?')[0].partition('//')[2]}: {text[:400]}")


def _watch() -> None:
    """Note all answers that are errors."""
    for client in HTTP_CLIENTS:
        _watch_client(client)
    send = requests.Session.send

    def plain(self: Any, request: Any, **options: Any) -> Any:
        answer = send(self, request, **options)
        _note(request.method, request.url, answer.status_code, answer.text)
        return answer

    requests.Session.send = plain


def _watch_client(http: Any) -> None:
    """Note the errors that clients of httpx, or of its successor, are answered."""
    send, send_async = http.Client.send, http.AsyncClient.send

    def sync(self: Any, request: Any, **options: Any) -> Any:
        answer = send(self, request, **options)
        if answer.status_code >= FIRST_ERROR:
            answer.read()
            _note(request.method, request.url, answer.status_code, answer.text)
        return answer

    async def asynchronous(self: Any, request: Any, **options: Any) -> Any:
        answer = await send_async(self, request, **options)
        if answer.status_code >= FIRST_ERROR:
            await answer.aread()
            _note(request.method, request.url, answer.status_code, answer.text)
        return answer

    http.Client.send, http.AsyncClient.send = sync, asynchronous


_watch()


def pytest_configure(config: pytest.Config) -> None:
    for name in ("slow_test", "skip_global_cleanup", "core_model", "cpu_test", "cpu_model", "optional"):
        config.addinivalue_line("markers", name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    _used.clear()
    _errors.clear()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        message = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
        _write(item.nodeid, report.outcome, message)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        lines = str(report.longrepr).strip().splitlines()
        _write(report.nodeid, "not collected", lines[-1] if lines else "")


def _write(test: str, outcome: str, message: str) -> None:
    line = {
        "test": test,
        "outcome": outcome,
        "message": " ".join(message.split())[:800],
        "used": sorted(set(_used)),
        "errors": _errors[-3:],
    }
    with open(os.environ["VLLM_TESTS_RESULTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
