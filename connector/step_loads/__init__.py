"""Loads inside an engine step, on the engine's thread."""
