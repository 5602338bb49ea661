"""What fully sharded training costs and saves, beside plain data parallelism and PyTorch."""
