"""``lockstep verify``: checks that N replicas compute what one replica computes, and explains why if they do not.

The user's unchanged program runs twice, each time in a process of its own. Begin reading at ``report.verify``.

    config <- trace <- interventions <- recorder <- runner     one run: what is recorded, and in which process
    trace <- compare <- experiments <- causes <- report        two runs compared; hypotheses tested; the report
"""
