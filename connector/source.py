"""P's numbers of a part of D's pages, where they are converted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.connector.dtypes import CONVERTIBLE, scales
from kvferry.connector.geometry import GroupGeometry
from kvferry.kernels.convert import Conversion


@dataclass(frozen=True, slots=True)
class Source:
    """``group`` is P's region, ``layer`` the part's first one there."""

    group: GroupGeometry
    layer: int

    def conversion(self, ours: GroupGeometry, layer: int, num_layers: int) -> Conversion:
        """To ours: ``num_layers`` from number ``layer`` on."""
        content = ours.content_bytes // CONVERTIBLE[ours.dtype].itemsize
        sides = ((self.group, self.layer), (ours, layer))
        of, to = (
            np.array([scales(group, first + n) for n in range(num_layers)], dtype=np.float32) for group, first in sides
        )
        # Where K ends makes no difference to scales of 1, and is known elsewhere (``dtypes.check_same``).
        return Conversion(self.group.dtype, ours.dtype, content, ours.keys or 0, of, to)
