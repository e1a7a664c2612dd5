"""Integrations with Hugging Face, Lightning and ONNX.

Each module needs its extra, except `library_masks`, which holds facts only.
"""
