"""What only looks at a step while it runs, and changes none of its numbers.

    rows.py             follows the rows of a shard through a step, and finds losses that combine rows
    calls_on_copies.py  makes a call of the step again with other rows
    read_numbers.py     finds numbers that a step reads from rows, out of torch's sight

Begin there.
"""
