"""Which workers form a job, and which of them this process is: the only package that reads the environment for it.

    spec         ``ClusterSpec`` (public) and addresses
    variables    environment variables of one source, with errors that name them
    tf_config, launcher_variables (MPI's and others; launcher_process), slurm, services   one source of variables each
    environment  which of these sources declares the cluster, and torchrun's variables; begin here
    local        a worker's GPUs and cores among those of its host

Each imports only those before it.
"""
