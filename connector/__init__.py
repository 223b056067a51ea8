"""KV caches of an engine, and their way from P to D: the two halves, in vLLM or any other engine."""
