"""Training recipes: complete, runnable configurations of published workloads, on data that any machine has.

Each recipe is a package (``mlm``, ``images``, ``reviews``): its ``config`` holds a frozen dataclass; its ``train``
builds module and data from a config and trains them. ``training`` is the common path of mlm and images, ``exactness``
compares a run with one device, ``text`` reads and tokenizes text, ``memory`` has LoRA, quantisation and activation
checkpointing, ``shuffling`` repeatable orders, ``from_hub`` loads models by name, ``model_card`` and ``run_record``
write README.md and result.json beside the weights. transformers and the like are imported when they are used. Begin
with ``mlm.train``.
"""
