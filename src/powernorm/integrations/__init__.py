"""Integrations with Hugging Face, Lightning and ONNX.

Each module needs its extra, but `library_masks`, which holds facts alone.
"""
