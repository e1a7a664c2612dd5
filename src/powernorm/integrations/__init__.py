"""powernorm inside other libraries: Hugging Face, Lightning, ONNX. Each module needs its extra."""
