"""`tfdist run --hosts`: the processes of a run on several hosts, which are reached by ssh.

On each host an agent (`agent.py`) starts, hears, watches and ends the processes, with the code that does so on one
machine. The launcher talks to the agents through the standard input and output of ssh (`connection.py`), and shows
each process to its supervisor as if it ran here (`group.py`).
"""
