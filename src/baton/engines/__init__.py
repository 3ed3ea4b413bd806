"""Backends behind the seam of `engine.py`."""
