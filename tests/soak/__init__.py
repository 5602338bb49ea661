"""A long training under random faults, which ends as if there had been none: `python -m tests.soak`."""
