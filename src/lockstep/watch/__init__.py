"""What only looks at a step while it runs, and changes none of its numbers. The moments are in ``replicas.watcher``.

    check_choice     which runs of a step are looked at, and by what
    step_guard       every torch call of several replicas: what would affect others is refused
    first_run        what a first run leaves behind; ``captures``: the values that a function can reach
    python_draws     random numbers of Python and NumPy, and seeds that replicas have in common
    loss_graph_check the losses that are differentiated, by the nodes of their graphs
    row_check        losses that combine rows: begins ``row_dependence``, which follows them by ``calls_on_copies`` and
                     ``numbers_from_rows``, and warns
    check_schedule   the steps in which the losses are checked
    loss_parts       whether a loss of a shard is the sum of what it gives for parts of it

Begin with ``check_choice``.
"""
