"""What hand-overs between two deployments cost, computed before any engine runs. Pure but for the command: no
clock, no socket."""
