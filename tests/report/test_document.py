"""The file of a report: one page, whatever the names in it, that asks nobody for anything."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dagexec.errors import DagexecError
from dagexec.report.document import check_report
from tests.report.pages import HOSTILE, data_of, hostile_report, large_report, made_up_report


class Elements(HTMLParser):
    """What a page consists of."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_names_of_a_model_are_never_markup() -> None:
    page = hostile_report().html()
    assert [tag for tag, _ in Elements(page).found if tag in ("script", "img")] == ["script", "script"]
    (section,) = data_of(page)
    assert HOSTILE in json.dumps(section, ensure_ascii=False).replace('\\"', '"')


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = made_up_report().html()
    assert not [attributes for _, attributes in Elements(page).found if {"src", "href"} & attributes.keys()]
    (policy,) = [one["content"] for tag, one in Elements(page).found if tag == "meta" and "http-equiv" in one]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


@pytest.mark.slow
def test_the_page_is_small() -> None:
    assert len(made_up_report().html().encode()) < 300_000
    assert len(large_report(10_000).html().encode()) < 3_000_000


def test_braces_in_names_are_text() -> None:
    report = made_up_report()
    page = type(report)("{{script}}", ("{{data}}",), ()).html()
    assert page.count("<script") == 2
    assert '<h1>{{script}}</h1><p class="verdict">{{data}}</p>' in page


def test_a_place_that_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    with pytest.raises(DagexecError, match=r"expected a name that ends with \.html"):
        check_report(tmp_path / "report.pdf")
    with pytest.raises(DagexecError, match="is not a folder"):
        check_report(tmp_path / "missing" / "report.html")
    check_report(tmp_path / "report.html")
