"""What crosses a process border: messages between ranks, plans and results between the halves, metrics. No I/O."""
