"""The sum of gradients over all replicas. Begin with ``exchange``.

``exchange`` sums within one process and between workers that hold parts of a model, ``buckets`` between workers during
the backward pass. ``user`` shows the sums to a step that reads ``.grad`` and to hooks on parameters.
"""
