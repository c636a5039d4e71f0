"""The turns and the penalty of a micro-batch as CUDA graphs: a launch forward, one backward.

reasons.py    why a run can't have them
recorder.py   what captures and replays: CUDA, or a stand-in on the CPU
kinds.py      the kinds of micro-batches, and which are worth a capture
recorded.py   one pair of graphs: turns and penalty, forward and backward
graphs.py     the pairs of a run, by number of turns and penalty
"""
