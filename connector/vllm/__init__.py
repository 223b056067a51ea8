"""vLLM's connector contract over KVFerry: the only package that imports vLLM."""
