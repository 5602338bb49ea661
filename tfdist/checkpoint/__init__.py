"""What `BackupAndRestore` consists of: the folder, the format, the state of a fit and where it is in its data."""
