"""The documentation as a site, built as ``make site`` does: complete, and nothing in it comes from another host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "mkdocs.yml"
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)\"|<link\b(?![^>]*canonical)[^>]*href=\"([^\"]+)\""
)


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


def test_nothing_is_fetched_from_another_host_and_pictures_are_shown(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    fetched = {page: ["".join(found) for found in FETCHED.findall(page.read_text())] for page in pages}
    assert all(fetched.values())
    assert [url for urls in fetched.values() for url in urls if re.match(r"(?:\w+:)?//", url)] == []
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//", style.read_text()), style
    shown = [url for url in fetched[site / "docs" / "benchmarks.html"] if url.endswith(".svg")]
    assert shown and all((site / "docs" / url).is_file() for url in shown)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/api.md"])
def test_a_page_reads_as_it_does_in_the_repository(page: str, site: Path) -> None:
    """MkDocs' Markdown is not CommonMark: a list right behind a line of text is none for it."""
    expected = MarkdownIt("commonmark").enable("table").render((ROOT / page).read_text())
    path = site / ("index.html" if page == "README.md" else Path(page).with_suffix(".html"))
    shown = path.read_text().split('itemprop="articleBody">')[1].split("<footer>")[0]
    for tag in ("li", "tr", "td", "pre", "code", "h1", "h2", "h3", "img", "ol", "ul", "strong"):
        assert len(re.findall(f"<{tag}[ >]", shown)) == len(re.findall(f"<{tag}[ >]", expected)), tag


def test_the_reference_has_each_name_with_its_members(site: Path) -> None:
    page = (site / "docs" / "api.html").read_text()
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    half = "kvferry.connector.engine.scheduler.SchedulerHalf"
    names += [f"{half}.take_plan", f"{half}.set_ranks", f"{half}.clock"]  # its own, of a base class, a field
    assert [name for name in names if f'id="{name}"' not in page] == []
    assert "Tokens of a block, on all ranks together" in page  # the comment behind a field


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


def test_dead_links_and_pages_without_a_place_are_errors(tmp_path: Path) -> None:
    dead = ("none.md", "settings.md#none", "../benchmarks/results", "/settings.md", "none.png")
    said = small_site(tmp_path, " ".join(f"[a]({link})" for link in dead))
    assert "strict mode" in said and "docs/settings.md" in said
    assert [link for link in dead if f"'{link}'" not in said] == []
