"""`tfdist drill`: runs a user's own script on this machine, disturbs it, and compares how it ends."""
