"""Which workers form a job, and which of them this process is: the only package that reads the environment for it.

``spec`` has ``ClusterSpec`` (public) and addresses; ``environment`` reads TF_CONFIG, torchrun's and SLURM's variables;
``local`` finds a worker's GPUs and cores among those of its host. Each imports only those before it.
"""
