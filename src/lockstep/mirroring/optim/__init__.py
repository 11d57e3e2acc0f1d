"""The mirrored optimizer. Begin with ``optimizer``, the torch.optim.Optimizer that users see.

``update`` updates all replicas once: it clips the gradients' global norm, and skips the update after a loss that is
NaN or infinite. ``gradient_sums`` sums gradients for a program that looks at them before an update.
``storage_optimizers`` applies the update to each storage of the weights, ``step_hooks`` finds what a program has put
around its optimizer's step, and ``misuse`` refuses plain optimizers and schedulers inside a step.
"""
