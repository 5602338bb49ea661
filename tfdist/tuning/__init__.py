"""`tfdist tune`: a KerasTuner search of several tuners, which share one oracle."""
