"""Whole training steps as CUDA graphs, captured once and replayed. Steps on a CPU never come here.

steps     runs each step as usual, observed, captured or replayed. Begin here.
checks    which steps cannot be captured, and whether two steps are alike
"""
