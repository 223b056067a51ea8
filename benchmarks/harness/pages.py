"""The generated parts of the documentation about measurements, from benchmarks/results/ and pages.toml, which says how.

    python benchmarks/harness/pages.py SECTION ...

``docs/generate.py`` writes them into README.md and docs/. ``make bench RESULTS=benchmarks/results`` measures the CPU
results again, ``make bench-gpu`` with the same option the GPU results.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import msgspec

RESULTS = Path(__file__).resolve().parents[1] / "results"
PICTURE = "gpu_planes.svg"
Row = Mapping[str, Any]


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """One of the results of a section. All fields: see pages.toml."""

    result: str
    packages: str | list[str] = "cpu"
    what: str = ""


class Section(msgspec.Struct, forbid_unknown_fields=True):
    """What stands in pages.toml for one place, or for a text or a table that several places have."""

    page: str = ""
    result: str = ""
    packages: str | list[str] = "cpu"
    text: str = ""
    columns: dict[str, str] = {}
    like: str = ""
    by: list[str] = []
    over: str = ""
    rows: str = "rows"
    part: str = ""
    parts: list[Part] = []


_toml = tomllib.loads(Path(__file__).with_name("pages.toml").read_text())
PACKAGES: dict[str, list[str]] = _toml.pop("packages")
NAMES: dict[str, dict[str, str]] = _toml.pop("names")
OF = msgspec.convert(_toml, dict[str, Section])


def load(name: str) -> dict[str, Any]:
    """A committed result."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


class Cells(Formatter):
    """The formats of pages.toml."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except KeyError:
            return None, field_name

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[Any, Any]) -> Any:
        return kwargs[key]

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "count":
            return f"{value or 0:,}"
        if value is None:
            return ""
        if format_spec == "yes":
            return "yes" if value else "no"
        if format_spec in NAMES:
            return NAMES[format_spec].get(value, f"`{value}`")
        if format_spec == "rate":
            return rate(value)
        if format_spec == "mib":
            return f"{value / 2**20:.0f}"
        if format_spec == "counts":
            return ", ".join(f"{count} {name}" for name, count in value.items())
        return format(value, format_spec)

    def cell(self, form: str, row: Row) -> str:
        return " / ".join(filter(None, (self.vformat(part, (), row) for part in form.split(" / "))))


def table(rows: Iterable[Row], columns: Mapping[str, str]) -> str:
    """A line for each row; ``columns``: as in pages.toml. A column without any cell is left out."""
    rows = list(rows)
    found = {head: [Cells().cell(form, row) for row in rows] for head, form in columns.items()}
    kept = [[head, "---", *cells] for head, cells in found.items() if any(cells)]
    return "\n".join("| " + " | ".join(line) + " |" for line in zip(*kept, strict=True))


def by(fields: Sequence[str], over: str, rows: Iterable[Row]) -> list[dict[Any, Any]]:
    """A row for each value of ``fields``, with the first row for each value of ``over`` that has it: of a busy D, the
    row of fresh block tables."""
    found: dict[tuple[Any, ...], dict[Any, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in fields)
        found.setdefault(key, dict(zip(fields, key, strict=True))).setdefault(row[over], row)
    return list(found.values())


def machine(result: Row, packages: str | list[str]) -> str:
    """On what a result was measured, as a sentence without its end."""
    found = result["versions"]
    gpus = "" if found.get("gpus", "none") == "none" else f"{found['gpus']}, driver {found['driver']}, "
    installed = "".join(f", {name} {found[name]}" for name in PACKAGES.get(str(packages), packages))
    return f"Machine: {gpus}{found['cpus']} cores ({found['cpu']}), Python {found['python']}{installed}"


def short(result: Row) -> str:
    """The same in a few words."""
    found = result["versions"]
    gpus = found.get("gpus", "none")
    return f"{found['cpus']} cores ({found['cpu']})" if gpus == "none" else f"{gpus}, vLLM {found['vllm']}"


def policy_sentence(result: Row) -> str:
    """Under which ``kv_load_failure_policy`` vLLM engines were measured."""
    return f"Measured with `kv_load_failure_policy` `{result.get('policy', 'recompute')}`."


def text(template: str, known: Row) -> str:
    paragraphs = template.strip().split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ").format_map(known) for paragraph in paragraphs).strip()


def filled(name: str, of: Section | Part, template: str) -> str:
    """The text of a section, or of a part of it."""
    section, result = OF[name], load(of.result)
    more = PREPARED[name](result) if name in PREPARED else {}
    rows = more.get("rows") or result.get(section.rows, ())
    rows = [rows] if isinstance(rows, dict) else rows
    rows = by(section.by, section.over, rows) if section.by and "rows" not in more else rows
    columns = OF[section.like or name].columns
    known = {
        "policy_is": policy_sentence(result), "machine": machine(result, of.packages), "short": short(result), **result,
        "table": table(rows, columns), **more,
    }  # fmt: skip
    return text(template, known | {"what": of.what.format_map(known)} if isinstance(of, Part) else known)


def section(name: str) -> str:
    """What stands at one place."""
    of = OF[name]
    if not of.parts:
        return filled(name, of, of.text)
    parts = [filled(name, part, of.part) for part in of.parts if (RESULTS / f"{part.result}.json").exists()]
    return text(of.text, {"policy_is": policy_sentence(load(of.result)), "parts": "\n\n".join(parts)})


# --- what is computed beside the fields of a result, by section -------------------------------------------------------


def points() -> dict[str, Row]:
    """Rows of ``gpu_planes.json`` by point and contender."""
    return {row["point"]: row for row in by(["point"], "contender", load("gpu_planes")["rows"])}


def rate(row: Row) -> str:
    """GB/s; ``*`` where a change of layout is not included."""
    if "error" in row:
        return "failed"
    return f"{row['gb_per_s']:.{0 if row['gb_per_s'] >= 100 else 1}f}{'' if row['changes_form'] else '*'}"


def gpu_planes_picture() -> str:
    """GB/s between two GPUs by the length of the prompt."""
    from benchmarks.harness.pictures import lines_picture  # matplotlib is not where benchmarks run

    found = points()
    lengths = {name: float(name.split("_")[1]) for name in found if name.startswith("tokens_")}
    lines = {}
    for contender, name in NAMES["lines"].items():
        line = [(tokens, found[point][contender]["gb_per_s"]) for point, tokens in lengths.items()]
        lines[f"{name}: {line[-1][1]:.0f}"] = line
    title = f"The KV cache of one prompt between two GPUs ({load('gpu_planes')['versions']['gpus']})"
    return lines_picture(title, "prompt tokens (Llama-8B, 128 KiB of KV for each)", "GB/s", lines)


def gpu_bandwidth(result: Row) -> Row:
    lines = [line for lines in result["ucx_transports"].values() for line in lines if "GPU" in line]
    transports = ", ".join(sorted({line.rsplit(", ", 1)[1] for line in lines})) or "host transports"
    found = points()
    return {"rows": [found[name] for name in NAMES["points"]], "transports": transports, "picture": PICTURE}


def cpu_bandwidth(result: Row) -> Row:
    times = ", ".join(f"`{row['plane']}` {row['ms_p50']:.2f} ms" for row in load("empty_handover")["rows"])
    return {"times": times}


def quiet_step(result: Row) -> Row:
    section = OF["gpu-quiet-step"]
    rows = by(section.by, section.over, sorted(result["rows"], key=lambda row: row["figure"] != "gap"))
    for row in rows:
        row["what"] = row["figure"].replace("hit_", "prefix hit, ") + " tokens" * (row["figure"] != "gap")
    return {"rows": rows}


def by_load(rows: Iterable[Row]) -> list[Row]:
    """Rows of ``busy.py``: what is compared is side by side."""
    return sorted(rows, key=lambda row: (row["order"], row["sequences"], row["tokens"]))


def streamed(rows: Iterable[Row]) -> list[Row]:
    """Without the times of a transfer where next to no KV went to D."""
    return [row if row["mib"] >= 1 else {**row, "mib": None, "before_end": None, "moving_ms": None} for row in rows]


def streaming(result: Row) -> Row:
    samples = [row["samples"] for row in result["rows"]]
    known = {**result, "least": min(samples), "most": max(samples)}
    return {"columns_are": text(OF["streaming-columns"].text, known), "rows": streamed(result["rows"])}


def prefix_reads(result: Row) -> Row:
    crossover = result["figures"].get("crossover_tokens")
    return {
        "settings": json.dumps(result["kv_config"]),
        "sooner": f"from {crossover} tokens on" if crossover else "at no length that was measured",
        "replayed": table(result["replays"], OF["prefix-replays"].columns),
    }


def wrong_answers(result: Row) -> Row:
    order = list(dict.fromkeys(row["fault"] for row in result["rows"]))
    rows = sorted(result["rows"], key=lambda row: order.index(row["fault"]))
    return {"rows": [row | {"fault": row["fault"] + f" ({row['source']})" * bool(row["source"])} for row in rows]}


def odd_requests(result: Row) -> Row:
    """How many answers through a router are those of D alone, by path; and the requests whose answers are not."""
    answers = result["answers"].items()
    names = dict.fromkeys(row["name"] + ", streamed" * row["streamed"] for row in result["rows"])
    return {
        "rows": [{"path": path, "answers": sum(counts.values()), **counts} for path, counts in answers],
        "differing": f"Different: {'; '.join(names)}." if names else "",
    }


def soak(result: Row) -> Row:
    """Of each quantity, the process that grew most; and what became of the hand-overs."""
    most = [
        max((row for row in result["rows"] if row["quantity"] == quantity), key=lambda row: row["growth"])
        for quantity in NAMES["quantities"]
    ]
    ends = ", ".join(
        f"`{plane}` {counts['loaded']:,} loaded, {counts.get('failed', 0)} failed, "
        f"{counts.get('aborted', 0) + counts.get('aborted before the load', 0):,} given up"
        for plane, counts in result["outcomes"].items()
    )
    return {"rows": most, "ends": ends}


def walks(result: Row) -> Row:
    columns, ends = str(OF["walks"].columns), {end for row in result["rows"] for end in row["outcomes"]}
    assert all(f"[{end}]" in columns for end in ends), f"pages.toml has not all of {ends}"
    return {"happened": ", ".join(f"{name} {count:,} times" for name, count in result["events"].items())}


def router_cost(result: Row) -> Row:
    return {"waited": ", ".join(f"{wait:.0f} ms ({shape})" for shape, wait in result["waits"].items())}


def named(form: str, rows: Iterable[Row]) -> dict[str, Row]:
    """Rows by what the format makes of their fields."""
    return {form.format_map(row): row for row in rows}


PREPARED: dict[str, Callable[[Row], Row]] = {
    "end-to-end": lambda _: {
        **named("{name}, {tokens}, {way}", load("gpu_streaming")["rows"]),
        **named("scattered {tokens} {connector}", load("gpu_busy_scattered")["rows"]),
    },
    "first-token": lambda run: named("{sequences}, {tokens}", by(["sequences", "tokens"], "connector", run["rows"])),
    "idle-cost": lambda result: {"rows": [row for row in quiet_step(result)["rows"] if row["figure"] == "gap"]},
    "gpu-bandwidth": gpu_bandwidth, "cpu-bandwidth": cpu_bandwidth, "gpu-quiet-step": quiet_step,
    "gpu-busy": lambda result: {"rows": by_load(result["rows"])},
    "gpu-streaming": streaming, "cpu-streaming": streaming, "prefix-reads": prefix_reads,
    "wrong-answers": wrong_answers,
    "router-cost": router_cost,
    "odd-requests": odd_requests,
    "bandwidth": gpu_bandwidth,
    "soak": soak, "walks": walks,
}  # fmt: skip
SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    page: {name: partial(section, name) for name, of in OF.items() if of.page == page}
    for page in dict.fromkeys(of.page for of in OF.values() if of.page)
}
"""By page."""


if __name__ == "__main__":
    for of_page in SECTIONS.values():
        for name in of_page.keys() & set(sys.argv[1:]):
            print(of_page[name]())
