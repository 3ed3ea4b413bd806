"""Slow twins of the public functions of `baton.core`, written from the equations alone.

Plain Python floats, explicit loops over rows, tokens, states and vocabulary. Nothing here imports torch or
scipy, so that a fault of theirs, or of how they are used, cannot stand on both sides of a comparison.
"""
