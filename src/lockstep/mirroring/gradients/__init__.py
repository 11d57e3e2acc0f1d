"""The sum of gradients over all replicas. Begin with ``local_sum``.

``local_sum`` sums within one process and between workers that hold parts of a model, ``bucketed_all_reduce`` between
workers during the backward pass. ``state`` says where the gradients are, as a table of states and transitions, and
gives the sums to a step that reads ``.grad``. ``parameter_hooks`` calls the user's hooks on parameters.
"""
