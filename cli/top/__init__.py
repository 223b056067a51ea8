"""What engines say on their ``/metrics`` pages: ``kvferry top`` shows a live table, ``kvferry drain`` waits for the end
of an engine's work.

``prometheus_text.py`` parses a page, ``engine_figures.py`` makes figures of two pages, ``poll.py`` fetches the pages,
``view.py`` draws the table, and ``drain.py`` waits.
"""
