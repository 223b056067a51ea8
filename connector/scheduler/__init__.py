"""The scheduler half of an engine: decides for each request, in the scheduler's process. No vLLM, no transfer."""
