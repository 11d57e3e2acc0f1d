"""The sum of gradients over all replicas. Begin with ``exchange``.

``exchange`` sums within one process and between workers that hold parts of a model, ``buckets`` between workers during
the backward pass. ``state`` knows where the gradients are and shows the sums to a step that reads ``.grad``; it has the
hooks by which both are told of gradients.
"""
