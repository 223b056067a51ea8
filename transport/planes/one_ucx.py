"""A process has one UCX: that of the plane ``ucx`` or that of ``nixl``.

Each of the two planes brings a UCX. The second one in a process gets no cache of registrations, and UCX 1.21 without it
ends the process when a peer dies in the middle of a message (``ucs_rcache_region_invalidate``). A rank that may have
both planes has the one with RDMA; where neither or both have it, ``ucx``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.planes.nixl_agent import choose_lanes, nixl_release
from kvferry.transport.planes.ucx_library import uses_rdma


def refuse_nixl(host: str, environ: Mapping[str, str], others: Collection[str]) -> None:
    """``others``: ``PlaneContext.others`` of ``nixl``, ``host`` its local address.

    Raises:
        PlaneUnavailableError: the process has the UCX of the plane ``ucx``; or the reason why it could not have
            ``nixl`` anyway, which says more.
    """
    if "ucx" in others:
        nixl_release()
        choose_lanes(host, environ)
        raise PlaneUnavailableError("nixl: a process can have one UCX, and has that of the plane ucx")


def refuse_ucx(host: str, environ: Mapping[str, str], others: Collection[str]) -> None:
    """``others``: ``PlaneContext.others`` of ``ucx``, ``host`` its local address.

    Raises:
        PlaneUnavailableError: ``nixl`` will have RDMA, and this UCX has none.
    """
    if "nixl" not in others or uses_rdma(environ):
        return
    try:
        nixl_release()
        rdma = choose_lanes(host, environ).rdma
    except PlaneUnavailableError:
        return
    if rdma:
        raise PlaneUnavailableError("ucx: a process can have one UCX, and nixl's has RDMA")
