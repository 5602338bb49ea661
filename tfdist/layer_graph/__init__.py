"""A Keras model as a list of calls of layers: what they cost, and how the list can be cut."""
