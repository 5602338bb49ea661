"""What a pipeline of stages costs and saves: speed against the schedules' ideal and PyTorch, memory, time to trace."""
