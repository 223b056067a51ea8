"""Fuzzing: mutated inputs for every decoder, and for every port of real engines."""
