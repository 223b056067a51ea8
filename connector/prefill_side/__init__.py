"""P's side of a hand-over, on the transfer thread: requests, leases, prompts under computation, sends."""
