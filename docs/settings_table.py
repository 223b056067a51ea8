"""The table of settings, from their definitions."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec.inspect

from kvferry.connector.config import ENVIRONMENT, Settings, plane_choices


def settings_table() -> str:
    """The settings as a Markdown table, for the documentation."""
    hints = get_type_hints(Settings, include_extras=True)
    rows = ["| setting | default | from, to | environment | meaning |", "|---|---|---|---|---|"]
    for field in msgspec.structs.fields(Settings):
        metas = getattr(hints[field.name], "__metadata__", ())
        text = next(m.description for m in metas if m.description)
        default = "unset" if field.default in (None, ()) else f"`{field.default}`"
        variable = f"`{ENVIRONMENT[field.name]}`" if field.name in ENVIRONMENT else ""
        if field.name == "plane":
            text += f": {', '.join(plane_choices())}"
        rows.append(f"| `{field.name}` | {default} | {_bounds(field.type)} | {variable} | {text} |")
    return "\n".join(rows)


def _bounds(kind: Any) -> str:
    """The least and the largest number of a type; empty for a type without numbers."""
    left: list[msgspec.inspect.Type] = [msgspec.inspect.type_info(kind)]
    while left:
        match left.pop():
            case msgspec.inspect.Metadata(type=inner):
                left.append(inner)
            case msgspec.inspect.UnionType(types=types):
                left.extend(types)
            case (
                msgspec.inspect.IntType(ge=least, gt=over, le=most)
                | msgspec.inspect.FloatType(ge=least, gt=over, le=most)
            ):
                return f"over {over} to {most}" if least is None else f"{least} to {most}"
    return ""
