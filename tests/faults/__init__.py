"""Faults between real P and D processes, drawn by a seed."""
