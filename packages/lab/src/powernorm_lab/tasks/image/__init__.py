"""The task of image classification."""
