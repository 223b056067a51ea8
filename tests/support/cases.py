"""Cases of tests with several axes."""

from __future__ import annotations

from collections.abc import Collection

import pytest


def each_once(names: str, *axes: Collection[object]) -> pytest.MarkDecorator:
    """As many cases as the longest axis has values: each value of each axis comes, with changing values of the others.
    For axes that do not change what another one does: all products would tell no more."""
    values = list(enumerate(map(list, axes)))
    cases = [
        tuple(axis[(n + shift * (n // len(axis))) % len(axis)] for shift, axis in values)
        for n in range(max(map(len, axes)))
    ]
    return pytest.mark.parametrize(names.split(), cases)
