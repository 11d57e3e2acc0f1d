"""Whole training steps as CUDA graphs, captured once and replayed. Steps on a CPU never come here.

steps     decides for each step: run it, observe it, capture it, or replay it. Begin here.
trace     observes a step: its operators, and whether the host waits for the device in it
capture   captures and replays a step: its inputs, gradients, learning rates and metrics
guards    what a captured step assumes, checked before every replay; why a step cannot be captured
"""
