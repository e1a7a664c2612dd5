"""Images and their classes: the official formats of MNIST and CIFAR-10, and drawn digits."""
