"""KV-binding utilities for engines other than vLLM, each with the behaviour of vLLM's function of that name."""
