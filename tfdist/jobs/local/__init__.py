"""The queue of this machine: jobs that run one after the other, or several at a time."""
