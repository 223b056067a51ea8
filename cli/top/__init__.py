"""``kvferry top`` and ``kvferry drain``: what the ``/metrics`` pages of engines show, and nothing else is asked."""
