"""Extension of Griffe for docs/api.md: the comment behind a field is its documentation, as a text below it would be."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, agent: Any, **_: Any) -> None:
        if attr.docstring is None and isinstance(node, ast.AnnAssign) and node.end_lineno and node.end_col_offset:
            line = agent.code.splitlines()[node.end_lineno - 1].encode()
            if found := re.fullmatch(r"  # (?!fmt:|noqa|type:)(.+)", line[node.end_col_offset :].decode()):
                attr.docstring = griffe.Docstring(found[1], lineno=node.end_lineno, parent=attr)
