"""Rates of running engines, from their pages of metrics: of a P and a D, given in any order."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry.cli.metrics_page import samples
from kvferry.cli.plan.command import PlanResult
from kvferry.cli.plan.engine_rates import (
    PREFILL_SECONDS,
    PROMPT_TOKENS,
    PROMPTS,
    SERIES,
    STEP_SECONDS,
    STEPS,
    engine_rates,
)
from tests.drain.pages import Pages
from tests.planning.test_plan_command import model, plan, trace

__all__ = ["model", "trace"]


def page(prompts: float, tokens: float, seconds: float, steps: float, step_seconds: float) -> str:
    """A page of two engines (data parallelism), each with half of the work."""
    values = {
        PROMPTS: prompts,
        PROMPT_TOKENS: tokens,
        PREFILL_SECONDS: seconds,
        STEPS: steps,
        STEP_SECONDS: step_seconds,
    }
    lines = [f'{name}{{engine="{n}"}} {value / 2}' for name, value in values.items() for n in range(2)]
    return "\n".join(["# HELP vllm:something", *lines, 'vllm:num_requests_running{engine="0"} 1.0', ""])


P, D = page(40, 80_000, 4.0, 0, 0), page(50, 50, 0.4, 2000, 24.0)
"""D computed one token of each prompt."""


@pytest.fixture
def engines() -> Iterator[list[Pages]]:
    started = [Pages(P), Pages(D)]
    yield started
    for server in started:
        server.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_p_tells_the_prefill_and_d_the_step(
    engines: list[Pages], model: Path, trace: Path, order: tuple[int, int]
) -> None:
    sources = [option for place in order for option in ("--from", engines[place].url)]
    out, targets = model / "plan.json", ["--trace", str(trace), "--ttft", "9", "--tpot", "0.1"]
    done = plan(model, *sources, *targets, "--json", str(out), rate=None)
    assert done.exit_code == 0, done.output
    assert f"{engines[0].url}: 2e+04 prompt tokens per second, the mean of 40\n" in done.output
    assert f"{engines[1].url}: 0.012 seconds of a step, the mean of 2000\n" in done.output
    read = msgspec.json.decode(out.read_bytes(), type=PlanResult)
    assert read.prefill_tokens_per_second == 20_000 and [rate.value for rate in read.rates] == [20_000, 0.012]
    given = plan(model, *targets, "--step-ms", "12", "--json", str(out), rate="20000")
    assert given.exit_code == 0
    same = msgspec.json.decode(out.read_bytes(), type=PlanResult)
    assert (same.prompts, same.fleet) == (read.prompts, read.fleet) and same.rates == []


def test_of_several_engines_the_one_tells_that_has_worked_most() -> None:
    pages = {"little": page(20, 2_000, 1.0, 200, 1.0), "much": page(20, 8_000, 2.0, 400, 8.0)}
    for order in (("little", "much"), ("much", "little")):
        found = engine_rates({name: samples(pages[name]) for name in order})
        assert found.prefill is not None and (found.prefill.engine, found.prefill.value) == ("much", 4000.0)
        assert found.step is not None and (found.step.engine, found.step.value) == ("much", 0.02)


def test_what_is_given_is_not_read(engines: list[Pages], model: Path) -> None:
    done = plan(model, "--from", engines[1].url, "--prompt", "100", rate="5000")
    assert done.exit_code == 0 and "the mean of" not in done.output, "D says nothing of a prefill, and need not"
    assert " 20.0 " in done.output, "100 tokens at 5000 per second"


@pytest.mark.parametrize(
    ("served", "message"),
    [
        ("", "no vLLM server, or one with --disable-log-stats"),
        ("<html>", "no metrics page: line 1"),
        (D, "no engine has computed 10 prompts of 32 tokens in the mean; send some to P, or give --prefill-tokens"),
        (page(9, 80_000, 4.0, 0, 0), "no engine has computed 10 prompts"),
        (page(40, float("nan"), 4.0, 0, 0), "no engine has computed 10 prompts"),
        (page(40, float("inf"), 4.0, 0, 0), "no engine has computed 10 prompts"),
        (page(40, 80_000, 0.0, 0, 0), "no engine has computed 10 prompts"),
        (page(40, 80_000, 4.0, 99, 1.0), "no engine has made 100 steps; have D answer more, or give --step-ms"),
    ],
)
def test_what_engines_do_not_tell_is_one_line(model: Path, trace: Path, served: str, message: str) -> None:
    server = Pages(served)
    done = plan(model, "--from", server.url, "--trace", str(trace), rate=None)
    server.close()
    check_line(done.exit_code, done.stderr, message)
    assert not done.stdout


@pytest.mark.parametrize(
    ("source", "message"),
    [("http://127.0.0.1:1", "--from http://127.0.0.1:1: Connection refused; name a running vLLM server"),
     ("engine", "'engine' is no URL of a server"),
     (None, "--prefill-tokens-per-second is missing; give it, or --from")],
)  # fmt: skip
def test_no_engine_is_one_line(model: Path, source: str | None, message: str) -> None:
    done = plan(model, *(() if source is None else ("--from", source)), rate=None)
    check_line(done.exit_code, done.stderr, message)


def check_line(exit_code: int, stderr: str, message: str) -> None:
    assert exit_code == 2 and stderr.startswith("kvferry: ") and stderr.count("\n") == 1 and message in stderr, stderr


@pytest.mark.vllm
def test_the_series_are_those_of_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    source = (Path(found.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    for name in SERIES:
        assert json.dumps(name.rpartition("_")[0]) in source, name
