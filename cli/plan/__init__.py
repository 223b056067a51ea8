"""What hand-overs between two deployments cost, computed before any engine runs. Pure but for the command and
``engine_rates``: no clock, no socket."""
