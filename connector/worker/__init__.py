"""The worker half of an engine: one rank, in the worker's process. No vLLM."""
