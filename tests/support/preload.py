"""The imports that a fork server makes before it forks (see ``fork_server``): the product's, and those of the objects
that tests have in its copies.

They start no thread, no CUDA context and no ZMQ context; ``fork_server`` checks that.
"""

from __future__ import annotations

import kvferry.connector.scheduler.scheduler
import kvferry.connector.worker.worker
import kvferry.kernels.convert
import kvferry.kernels.kv_postprocess
import kvferry.kernels.paged_copy
import kvferry.kernels.zero_blocks
import kvferry.transport.control.dialer
import kvferry.transport.control.listener
import kvferry.transport.planes.cma
import kvferry.transport.planes.cuda_ipc
import kvferry.transport.planes.shm
import kvferry.transport.planes.tcp
import kvferry.transport.planes.zmq
import kvferry.transport.registry  # noqa: F401
import tests.faults.pair
import tests.ranks.rank_host
import tests.support.pair
import tests.transport.plane_peer  # noqa: F401
