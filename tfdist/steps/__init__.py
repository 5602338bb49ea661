"""Training and test steps on several replicas: shares of a batch, collectives, gradients, layers' state, logs."""
