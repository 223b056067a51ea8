"""``kvferry top``: a live table of engines, from their ``/metrics`` pages.

``prometheus_text.py`` parses a page, ``engine_figures.py`` makes figures of two pages, ``poll.py`` fetches the pages,
and ``view.py`` draws the table.
"""
