"""Cost of the tangent against every other way to get it: `python -m benchmarks`.

    op       one op, its dual against a plain one and against other implementations
    block    forward + backward of a block: plain, and every way to its Jacobian penalty
    step     whole training steps by method, the published way and ours
    scaling  cost and memory of a block against length, depth, batch and width

What is timed is checked first; ways that are compared take turns in one run.
"""
