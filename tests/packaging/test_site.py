"""The documentation as a site, built as ``make site`` does: complete, and nothing in it comes from another host."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "mkdocs.yml"
PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
FETCHED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}


class Site(HTMLParser):
    """What a page of the site fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in FETCHED and values.get(FETCHED[tag]) and values.get("rel") != "canonical":
            self.fetched.append(values[FETCHED[tag]])


def build(config: Path, target: Path) -> str:
    """What a strict build says where it fails; empty where it ended well. Not with --quiet, which hides warnings also
    from --strict."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=800)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    assert build(CONFIG, target) == ""
    return target


@pytest.fixture(scope="module")
def parsed(site: Path) -> Callable[[Path], Site]:
    return cache(lambda path: Site(path.read_text(encoding="utf-8")))


def test_make_site_is_as_strict() -> None:
    make = ["make", "--no-print-directory", "-n", "-o", "install", "site"]
    recipe = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert recipe.split("mkdocs ")[1].split() == ["build", "--strict"]


def test_every_page_is_there(site: Path) -> None:
    assert {(site / page).with_suffix(".html").exists() for page in PAGES} == {True}
    assert "KVFerry moves the KV cache" in (site / "index.html").read_text()


def test_nothing_is_fetched_from_another_host(site: Path, parsed: Callable[[Path], Site]) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    assert {
        url for page in pages for url in parsed(page).fetched if urlsplit(url).netloc or url.startswith("//")
    } == set()
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//", style.read_text()), style


def test_pictures_of_results_are_shown(site: Path, parsed: Callable[[Path], Site]) -> None:
    shown = [url for url in parsed(site / "docs" / "promises.html").fetched if url.endswith(".png")]
    assert shown and all(url.startswith("../benchmarks/results/") for url in shown)


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_a_page_reads_as_it_does_in_the_repository(page: str, site: Path) -> None:
    """MkDocs' Markdown is not CommonMark: a list right behind a line of text is none for it."""
    expected = MarkdownIt("commonmark").enable("table").render((ROOT / page).read_text())
    path = site / ("index.html" if page == "README.md" else Path(page).with_suffix(".html"))
    shown = path.read_text().split('itemprop="articleBody">')[1].split("<footer>")[0]
    for tag in ("li", "tr", "td", "pre", "code", "h1", "h2", "h3", "img", "ol", "ul", "strong"):
        assert len(re.findall(f"<{tag}[ >]", shown)) == len(re.findall(f"<{tag}[ >]", expected)), tag


def small_site(folder: Path, text: str, *nav: str) -> str:
    """The warnings of a site of three pages, by our settings and our hook."""
    docs = folder / "docs"
    docs.mkdir()
    (folder / "README.md").write_text("# All\n\n[page](docs/page.md)\n")
    (docs / "page.md").write_text(f"# Page\n\n{text}\n")
    (docs / "settings.md").write_text("# Settings\n")
    (docs / "site.css").touch()
    (docs / "site_files.py").write_text((ROOT / "docs" / "site_files.py").read_text())
    (folder / "benchmarks" / "results").mkdir(parents=True)
    (folder / "benchmarks" / "one.json").write_text("{}")
    config = yaml.safe_load(CONFIG.read_text()) | {"nav": ["README.md", "docs/page.md", *nav]}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config))
    return build(folder / "mkdocs.yml", folder / "site")


def test_a_file_that_a_page_links_is_part_of_the_site(tmp_path: Path) -> None:
    assert small_site(tmp_path, "[a](../benchmarks/one.json) [b](settings.md#settings)", "docs/settings.md") == ""
    assert (tmp_path / "site" / "benchmarks" / "one.json").exists()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[a](none.md)", "none.md"),
        ("[a](settings.md#none)", "#none"),
        ("[a](../benchmarks/results)", "../benchmarks/results"),
        ("[a](/settings.md)", "/settings.md"),
        ("![a](none.png)", "none.png"),
    ],
)
def test_a_dead_link_is_an_error(text: str, what: str, tmp_path: Path) -> None:
    said = small_site(tmp_path, text, "docs/settings.md")
    assert what in said and "strict mode" in said


def test_a_page_without_a_place_in_the_navigation_is_an_error(tmp_path: Path) -> None:
    said = small_site(tmp_path, "text")
    assert "docs/settings.md" in said and "strict mode" in said
