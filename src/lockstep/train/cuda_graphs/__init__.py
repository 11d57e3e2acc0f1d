"""Whole training steps as CUDA graphs, captured once and replayed. Steps on a CPU never come here.

steps     decides for each step: run it, observe it, capture it, or replay it. Begin here.
trace     the operators of an observed step, compared with those of the next
capture   captures and replays a step: its inputs, learning rates and outputs
guards    which steps cannot be captured, and what a captured step assumes
"""
