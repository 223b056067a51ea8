"""The table of docs/commands.md: kvferry's commands with their options, as their parser has them."""

from __future__ import annotations

from typing import Any

import typer.main

from kvferry.cli.main import app

PAGES = {name: f"#kvferry-{name}" for name in ("bench", "check", "doctor", "drain")}
PAGES |= {"keygen": "../SECURITY.md", "plan": "planning.md", "router": "routers.md"}
"""The page of a command."""


def shown(option: Any) -> str:
    """``--name`` or, of a switch that is on, ``--no-name``; then its default, if it has one that says something."""
    if option.is_flag:
        return f"`{option.secondary_opts[0] if option.default and option.secondary_opts else option.opts[0]}`"
    known = option.default not in (None, "", ()) and not callable(option.default)
    default = f" {option.default}" if known else " (required)" if option.required else ""
    return f"`{option.opts[0]}`{default}"


def commands() -> str:
    rows = ["| command | what it does | options, and their defaults | page |", "|---|---|---|---|"]
    click_app: Any = typer.main.get_command(app)
    for name, command in sorted((n, c) for n, c in click_app.commands.items() if not c.hidden):
        arguments = "".join(f" {one.name.upper()}" for one in command.params if one.param_type_name == "argument")
        options = ", ".join(shown(one) for one in command.params if one.param_type_name == "option" and not one.hidden)
        does = " ".join(command.help.split("\n\n")[0].split())
        page = PAGES.get(name, "")
        link = f"[{'below' if page.startswith('#') else page.rpartition('/')[2]}]({page})" if page else ""
        rows.append(f"| `kvferry {name}{arguments}` | {does} | {options} | {link} |")
    return "\n".join(rows)
