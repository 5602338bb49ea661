"""`tfdist horovod build`: a wheel of Horovod for the installed TensorFlow."""
