"""docs/library.md runs as it stands, and each name of docs/api.md says its shapes, units and errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from textwrap import dedent

import griffe
import pytest
import yaml

from tests.docs.pages import BLOCK, ROOT
from tests.support.fork_server import fork_server

ERRORS = "kvferry.transport.errors"
Found = griffe.Object | griffe.Alias
NAMES = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
SAYS = {"torch.Tensor": re.compile(r"\[[\w.,\s+*()]+\]"), "float": re.compile("seconds|fraction|scales")}
"""By a part of an annotation, what the documentation has: a tensor's shape, a number's unit."""


def plugin() -> dict[str, list[str]]:
    (options,) = [each for each in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["plugins"] if each != "search"]
    python = options["mkdocstrings"]["handlers"]["python"]
    return {"paths": python["paths"], "extensions": python["options"]["extensions"]}


def extensions() -> griffe.Extensions:
    return griffe.load_extensions(*(str(ROOT / path) for path in plugin()["extensions"]))


@cache
def product() -> griffe.ModulesCollection:
    """As the site reads it."""
    loader = griffe.GriffeLoader(search_paths=[str(ROOT / path) for path in plugin()["paths"]], extensions=extensions())
    loader.load("kvferry")
    return loader.modules_collection


def shown(found: Found) -> Iterator[Found]:
    """A name of the page and all that the site shows below it, inherited members too."""
    yield found
    for name, member in found.all_members.items() if found.is_class or found.is_module else ():
        if not name.startswith("_") and (member.inherited or not member.is_alias):
            yield from shown(member)


def faults(found: Found) -> Iterator[str]:
    """What the documentation of a name leaves out. That of its class may say it."""
    own, parent = found.docstring, found.parent
    said = "".join(each.value for each in (own, parent and parent.is_class and parent.docstring) if each)
    if not own and not (found.is_attribute and re.search(rf"``[^`\n]*\b{found.name}\b[^`\n]*``", said)):
        yield "all"
    annotations = [found.annotation] if isinstance(found, griffe.Attribute) else []
    if isinstance(found, griffe.Function):
        annotations = [found.returns, *(each.annotation for each in found.parameters)]
        raised = (node.exc for node in ast.walk(ast.parse(dedent(found.source))) if isinstance(node, ast.Raise))
        names = {ast.unparse(error.func) for error in raised if isinstance(error, ast.Call)}
        yield from sorted(name for name in names if name not in said and f"{ERRORS}.{name}" in NAMES)
    for part, pattern in SAYS.items():
        if any(part in str(each) for each in annotations) and not pattern.search(f"{found.name} {said}".lower()):
            yield part


@pytest.mark.parametrize("name", NAMES)
def test_names_exist_and_say_shapes_units_and_errors(name: str) -> None:
    lacking = {each.path: missing for each in shown(product()[name]) if (missing := list(faults(each)))}
    assert lacking == {}


def test_the_page_has_what_its_readers_use() -> None:
    """What docs/library.md names or imports, and what the engine in examples/lib imports."""
    page = (ROOT / "docs" / "library.md").read_text()
    sources = [code for language, code in BLOCK.findall(page) if language == "python"]
    sources += [path.read_text() for path in (ROOT / "examples" / "lib").glob("*.py")]
    used = {name for name in re.findall(r"`(kvferry(?:\.\w+)+)`", page) if product()[name].is_class}
    utilities = re.findall(r"^\| `(\w+)` \| `(kvferry\.connector[\w.]+)` \|", page, re.MULTILINE)
    used |= {f"{module}.{name}" for name, module in utilities if not name.startswith("_")}
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvferry."):
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert len(used) > 40 and not {name for name in used if ".vllm." not in name} - {*NAMES}


((_, CODE),) = [found for found in BLOCK.findall((ROOT / "docs" / "library.md").read_text()) if found[0] == "python"]


def test_the_code_runs() -> None:
    done = fork_server().run("-c", CODE, timeout=800)
    assert (done.returncode, done.stdout) == (0, "40 tokens handed over\n"), done.stderr
    assert len(CODE.splitlines()) < 50
