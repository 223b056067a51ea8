"""vLLM's connector contract over KVFerry: the only package that imports vLLM."""

from __future__ import annotations

import re

from kvferry.transport.errors import KVFerryError

OLDEST = (0, 32)
"""The release of vLLM that has all that is used here."""


def check_release(version: str) -> None:
    """Raises KVFerryError: ``version``, vLLM's, is of a release before ``OLDEST``; one line. Builds without a number
    pass; 0.1 is what setuptools-scm calls one from a checkout without tags."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (0, 1) < (int(found[1]), int(found[2])) < OLDEST:
        raise KVFerryError(f"vLLM is {version}, KVFerry expects 0.32 or later; pip install -U 'vllm>=0.32'")
