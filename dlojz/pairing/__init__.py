"""Two programs of any make, compared by pairs of runs: whole trainings, by seed.

    from dlojz.pairing.seeds import by_seed
    found = by_seed("train.py --lr 0.1", "train.py --lr 0.2", read="accuracy: ([0-9.]+)")
    found                       # the difference with its interval, and a table of the seeds

`picture.plot_pairs(found)` draws it.
"""
