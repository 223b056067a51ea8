"""The control plane: ZMQ sockets of P and D, their keys, and guards against unauthenticated peers."""
