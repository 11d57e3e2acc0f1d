"""The mirrored optimizer. Begin with ``optimizer``, the torch.optim.Optimizer that users see.

``step`` runs one update on all replicas, ``clipping`` limits the global norm of the gradients, ``kernels`` applies the
update to each storage of the weights, ``nonfinite`` skips it after a loss that is NaN or infinite, and ``misuse``
refuses plain optimizers and schedulers inside a step.
"""
