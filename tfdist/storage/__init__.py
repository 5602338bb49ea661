"""Files by their paths, local or in a bucket: what backups need of either, and no more."""
