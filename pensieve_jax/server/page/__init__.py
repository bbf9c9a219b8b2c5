"""The built-in web page: a chat that shows where the KV cache of its conversations is.

Owns: the files beside this module, and the headers they are served with.
Does not know: the requests that the page sends. Its scripts use OpenAI's API and that of `server.cache_view`.
Called by `server.app`. These routes need no key, because the files contain no user data.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.replies import BytesResponse, HttpResponse
from pensieve_jax.server.http.request import HttpRequest

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
_HEADERS: Final = {
    # No other origins and no inline scripts, so that text from a model never runs as a script. Only DOMPurify
    # may make elements from text.
    "content-security-policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _read() -> dict[str, BytesResponse]:
    """Read every file of the page, by its path; vendor/ has copies of other projects."""
    root = resources.files(__package__)
    files = {}
    for folder, prefix in ((root, ""), (root / "vendor", "vendor/")):
        for file in folder.iterdir():
            suffix = file.name.rpartition(".")[2]
            if suffix in _TYPES:
                files[prefix + file.name] = BytesResponse(file.read_bytes(), _TYPES[suffix], headers=_HEADERS)
    return files


_FILES: Final = _read()


async def index(call: HttpRequest) -> HttpResponse:
    """Answer GET / with the page."""
    return _FILES["index.html"]


async def asset(call: HttpRequest) -> HttpResponse:
    """Answer GET /page/{name} with a script or style sheet of the page."""
    return _file(call.path["name"])


async def vendored(call: HttpRequest) -> HttpResponse:
    """Answer GET /page/vendor/{name} with a script of another project."""
    return _file(f"vendor/{call.path['name']}")


def _file(name: str) -> HttpResponse:
    if name not in _FILES:
        raise ApiError(404, "unknown_url", f"The file {name!r} does not exist.")
    return _FILES[name]


ROUTES: Final = (
    Route("GET", "/", index, needs_key=False),
    Route("GET", "/page/{name}", asset, needs_key=False),
    Route("GET", "/page/vendor/{name}", vendored, needs_key=False),
)
