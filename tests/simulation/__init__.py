"""P and D ranks in virtual time: real transfer threads (not started), real messages, a simulated network."""
