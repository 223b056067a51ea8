"""ROUTER sockets whose own routing ids nobody can predict.

A ROUTER names each connection whose peer announces no id by the next number of a counter. libzmq ends the process where
that name exists already, because another peer has announced it, and has no switch for that. The counter begins at a
value of C's ``rand``, which libzmq does not seed: in each fresh process it was 0x6b8b4567, and a holder of the key
ended the process within two seconds.
"""

from __future__ import annotations

import ctypes
import os
import threading

import zmq

_STATE_BYTES = 64
_libc = ctypes.CDLL(None)
_one_at_a_time = threading.Lock()
"""Two calls at once leave ``rand`` with the memory of one of them, which is free by then: the process crashed."""


def new_router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """A ROUTER whose counter begins at a random number of 32 bits. C's ``rand`` goes on afterwards as if nothing had
    called it: what this process computes with it stays the same."""
    if not hasattr(_libc, "initstate"):
        return context.socket(zmq.ROUTER)
    _libc.initstate.restype = _libc.setstate.restype = ctypes.c_void_p
    _libc.setstate.argtypes = [ctypes.c_void_p]
    state = ctypes.create_string_buffer(_STATE_BYTES)  # in use until ``setstate``
    seed = ctypes.c_uint(int.from_bytes(os.urandom(4), "little"))
    with _one_at_a_time:
        before = _libc.initstate(seed, state, ctypes.c_size_t(_STATE_BYTES))
        try:
            return context.socket(zmq.ROUTER)
        finally:
            _libc.setstate(before)
