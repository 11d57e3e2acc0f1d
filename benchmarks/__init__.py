"""Benchmarks of this repository, on one harness. They are not part of the package.

    trial (workload, contender, trial, ``--only``) -> processes, programs (start a trial's processes)
    -> harness (rounds, samples) -> results (figures, ratios, targets) -> report (Markdown and JSON)

``suites`` has a module a suite, ``gpu`` the suite for a GPU, ``peers`` the programs of other frameworks, which run in
environments of their own. Begin with ``__main__``, then ``suites/cpu``.
"""
