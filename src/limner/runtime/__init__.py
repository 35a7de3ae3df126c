"""Drawing without torch: ONNX Runtime computes, numpy samples. No module of this package imports torch."""

FILE = "onnx.json"  # of a bundle with ONNX graphs
FORMAT = "limner-onnx-1"
WEIGHTS = ("dvae.safetensors", "prior.safetensors", "contrastive.safetensors")  # which the graphs refer to
