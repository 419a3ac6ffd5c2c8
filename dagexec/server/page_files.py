"""The files of the live page. They have nothing of the server in them, so that they are open to all; its state is not.

The page asks for the state with the token that its user types in, if the server wants one. A browser may take scripts
and styles from this server alone, ask nobody else, and not show the page within another.
"""

from __future__ import annotations

from functools import cache

from dagexec.core.drawing.pages import page_file

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}

_OWN = "dagexec.server"
_PARTS = {
    "/": ("text/html", (("live.html", _OWN),)),
    "/live.css": ("text/css", (("page.css", ""), ("live.css", _OWN))),
    "/live.js": ("text/javascript", (("svg.js", ""), ("details.js", ""), ("lanes.js", _OWN), ("live.js", _OWN))),
}


@cache
def page_at(path: str) -> tuple[str, str]:
    """The text of the file there, and its media type."""
    media_type, parts = _PARTS[path]
    texts = (page_file(name, package) if package else page_file(name) for name, package in parts)
    return "\n".join(texts), f"{media_type}; charset=utf-8"
