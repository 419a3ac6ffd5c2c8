"""The style and the scripts that pages have in common: reports, and the live page of a server. They are in `page/`."""

from __future__ import annotations

from importlib.resources import files


def page_file(name: str, package: str = __package__) -> str:
    """The text of a file in the folder `page` of a package: by default one that several pages have."""
    return files(package).joinpath("page", name).read_text(encoding="utf-8")
