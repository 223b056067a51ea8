"""Lets the tests here, and the processes that they start, import the cases that they share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
