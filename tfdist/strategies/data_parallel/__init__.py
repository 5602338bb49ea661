"""Data parallelism: replicas share the rows of each batch. One batch of `fit`, in the order in which data flow:

compat/keras.py          which functions of Keras ask which hook (../hooks.py: the interface of all strategies)
strategy.py              `DataParallelHooks`: what these strategies answer; `run`: takes a step of Keras
  dataset.py               which rows of a batch a replica gets
  replica_step.py          the step on a replica (steps/keras_step.py: the object of the step that is traced)
    steps/in_step.py         losses and metrics weighted by rows, seeds, branches
    batch_norm.py            BatchNormalization over the global batch
    state.py                 moving averages (steps/local_values.py: what differs by replica)
    steps/gradients.py       `optimizer.apply`: gradients and state, packed in buckets, weighted
    steps/reduce.py          added up over the replicas, between processes by runtime/exchange.py or by TensorFlow
  row_trial.py             when a step was traced, once: a trial of it that finds what mixes rows
  strategy.py              logs, or outputs of `predict`, as Keras expects them

`predict` goes the same way, without gradients and state: replica_step.py tells outputs with rows from others, and the
hook `concatenate` puts the rows of all replicas together.
"""
