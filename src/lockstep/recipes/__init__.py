"""Training recipes: complete, runnable configurations of published workloads, on data that any machine has.

Each recipe is a package (``mlm``, ``images``, ``reviews``). Its ``config`` holds a frozen dataclass and the function
that returns it; its ``train`` builds module, data and optimizer from a config and trains them. Begin reading with
``mlm.train``. ``text`` reads and tokenizes text; ``memory`` has LoRA, quantisation and activation checkpointing;
``exactness`` compares a run with one device. A recipe imports transformers and the like only when it is used.
"""
