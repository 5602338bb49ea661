"""What parameter servers cost a training step: tfdist, the stock strategy with tf_keras, and Keras on its own."""
