"""The two halves of an engine: the scheduler half decides per request, the worker half runs on one rank. No vLLM."""
