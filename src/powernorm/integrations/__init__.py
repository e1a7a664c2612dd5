"""Integrations with Hugging Face, Lightning and ONNX. Each module needs its extra."""
