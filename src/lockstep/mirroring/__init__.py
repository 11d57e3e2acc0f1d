"""Mirrored modules, optimizers, metrics and variables: one copy for each replica, kept equal.

Begin with ``registry``, which knows everything that one strategy has mirrored.

- ``module/``: the mirrored module, its copies, and what keeps them equal between steps.
- ``gradients/``: how gradients are summed over replicas and workers.
- ``optim/``: the mirrored optimizer and its step.
- ``zero1``: optimizer state divided among workers. ``partition``: which part of a model a worker holds.
- ``variable``, ``metric``: the other objects that can be mirrored.

``optim`` uses ``gradients``, and ``module`` neither of them.
"""
