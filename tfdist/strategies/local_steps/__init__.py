"""Workers that train by themselves, and put together what they have learned now and then.

strategy.py     the strategy: a training step is given to each process alone
outer_model.py  what all begin a period from, and the optimizer that moves it
sending.py      a part of the weights is exchanged while the next steps are computed
"""
