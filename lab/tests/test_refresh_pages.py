"""Tables of pages equal those of the documents, and a wrong digit is detected."""

from __future__ import annotations

import pytest

from pensieve_jax import ConfigError
from tests.launching import load


@pytest.fixture
def pages():
    return load("refresh_pages")


def test_every_table_of_the_pages_is_that_of_the_documents(pages):
    texts = [page.read_text() for page in pages.PAGES]
    for text in texts:
        assert pages.refreshed(text) == (text, []), "run pensieve_lab.programs.refresh_pages"
    assert all(f"<!-- table {name} -->" in "".join(texts) for name in pages.TABLES)


@pytest.mark.parametrize("name", ["summary", "fig10", "kernels", "against-lru"])
def test_a_wrong_digit_is_found_and_mended(pages, name):
    text = pages.PAGES[0].read_text()
    start = text.index(f"<!-- table {name} -->")
    digit = next(i for i in range(text.index("| ---", start), len(text)) if text[i].isdigit())
    wrong = text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :]
    assert pages.refreshed(wrong) == (text, [name])


def test_refuses_a_table_that_there_is_none_of(pages):
    with pytest.raises(ConfigError, match="table is 'figure99'"):
        pages.refreshed("<!-- table figure99 -->\n<!-- end -->")


def test_check_writes_nothing_and_fails(pages, launch, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table kernels -->\n<!-- end -->\nwords\n")
    monkeypatch.setattr(load("refresh_pages"), "PAGES", (page,))
    assert launch("refresh_pages", shared_llm=False, check="true") == 1
    assert page.read_text() == "<!-- table kernels -->\n<!-- end -->\nwords\n"
    assert launch("refresh_pages", shared_llm=False) == 0
    assert page.read_text().endswith("<!-- end -->\nwords\n") and "| 4,096 |" in page.read_text()
    assert launch("refresh_pages", shared_llm=False, check="true") == 0
