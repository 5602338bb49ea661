"""`tfdist.HorovodStrategy`: data parallelism by Horovod's collectives."""
