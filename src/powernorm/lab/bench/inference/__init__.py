"""What a folded model gains at inference: whole encoders, in torch and in onnxruntime."""
