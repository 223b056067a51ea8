"""Two ranks without an engine, each in a process of its own, that hand a known pattern over.

``kvferry doctor`` checks data planes by them, ``kvferry bench`` measures them.
"""
