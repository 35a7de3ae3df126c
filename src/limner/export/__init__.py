"""Export of bundles to files that draw without torch. `runtime/` draws with the ONNX files."""
