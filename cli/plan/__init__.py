"""What hand-overs between two deployments cost, computed before any engine runs. Pure: no clock, no socket."""
