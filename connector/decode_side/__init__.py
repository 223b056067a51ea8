"""D's side of a hand-over, on the transfer thread: loads, reads, links, leases to keep alive, lookups."""
