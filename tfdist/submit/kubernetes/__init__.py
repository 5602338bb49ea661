"""Kubernetes: an Indexed Job with a headless Service and a Secret, through the official client."""
