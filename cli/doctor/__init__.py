"""``kvferry doctor``: whether this machine can run KVFerry, what is missing, and what to do about it.

``run.py`` lists the sections. A section is a function that returns findings (``findings.py``); none of them changes the
machine, or makes a key. ``self_test.py`` hands a known pattern over between two processes, ``peer.py`` asks a running
engine, and ``share.py`` writes a report that has no secrets.
"""
