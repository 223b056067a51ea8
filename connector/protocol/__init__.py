"""Messages between ranks, plans between the halves, and the state machines. No I/O, no clock."""
