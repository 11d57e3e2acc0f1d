"""Which workers form a job, and which of them this process is: the only package that reads the environment for it.

Begin with ``spec`` (``ClusterSpec``, public) and ``resolve``, which chooses among the forms in which a job is declared:
``tf_config``, ``torchrun`` and ``slurm``. They read variables with ``variables`` and addresses with ``address``.
``local`` finds a worker's GPUs and cores among those of its host.
"""
