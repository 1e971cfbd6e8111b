"""sentence-transformers' exporters for ONNX Runtime: fp32, its optimization level O3, and dynamic int8."""

from sentence_transformers import CrossEncoder, export_dynamic_quantized_onnx_model, export_optimized_onnx_model

model = CrossEncoder("model", backend="onnx", model_kwargs={"export": True})
model.save_pretrained("fp32")
export_optimized_onnx_model(model, "O3", "optimized")
export_dynamic_quantized_onnx_model(model, "avx512_vnni", "int8")
