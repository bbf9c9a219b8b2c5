"""Encodes long texts and reads long bodies: `python -m pensieve_jax.server.http.text_worker FD BYTES`.

Owns: the process's limit of memory, and the loop that answers one request after the other.
Does not know: who asks, or how long it waits. Called by `server.http.text_processes`, which starts it.

A library that gets no memory aborts the process, and one that takes minutes cannot be interrupted. Here both
end one request.
"""

from __future__ import annotations

import pickle
import resource
import sys
from array import array
from multiprocessing.connection import Connection
from typing import Any

import tokenizers

from pensieve_jax.server.http.bodies import decode_body
from pensieve_jax.server.http.errors import ApiError


def main() -> None:
    """Answer requests until the other end of the connection is closed."""
    connection = Connection(int(sys.argv[1]))
    backend = tokenizers.Tokenizer.from_str(connection.recv_bytes().decode())
    _limit_memory(int(sys.argv[2]))
    while True:
        try:
            kind, *arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_answer(backend, kind, arguments), pickle.HIGHEST_PROTOCOL))


def _answer(backend: tokenizers.Tokenizer, kind: str, arguments: list[Any]) -> Any:
    """Return the answer to a request, or the exception that it ends with."""
    try:
        match kind:
            case "encode":
                (encoding,) = backend.encode_batch_fast(arguments, add_special_tokens=False)
                return array("I", encoding.ids)
            case "offsets":
                (encoding,) = backend.encode_batch(arguments, add_special_tokens=False)
                return array("I", [start for start, _ in encoding.offsets])
            case "decode_body":
                body, struct, offers = arguments
                return decode_body(body, struct, offers=offers)
            case _:
                raise AssertionError(kind)
    except (UnicodeEncodeError, TypeError, ApiError) as error:
        return error


def _limit_memory(num_bytes: int) -> None:
    """Limit the address space to what the process has now and `num_bytes` more."""
    with open("/proc/self/statm") as statm:
        num_pages = int(statm.read().split()[0])
    most = num_pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
