"""The sum of gradients over all replicas. Begin with ``local``.

``local`` sums within one process, ``buckets`` between workers during the backward pass (``bucket_plan`` says which
gradients travel together), and ``partitioned`` where each worker holds a part of the model. ``user`` shows the sums
to a step that reads ``.grad`` and to hooks on parameters.
"""
