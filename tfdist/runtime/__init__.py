"""What a process of a job has while it trains: the other processes, control signals, files, servers, progress."""
