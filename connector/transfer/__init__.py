"""The transfer thread of one rank and everything that it drives: the only I/O of a hand-over."""
