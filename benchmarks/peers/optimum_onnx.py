"""optimum-onnx: fp32, and dynamic int8 with one scale a channel."""

from optimum.onnxruntime import ORTModelForSequenceClassification, ORTQuantizer
from optimum.onnxruntime.configuration import AutoQuantizationConfig

ORTModelForSequenceClassification.from_pretrained("model", export=True).save_pretrained("fp32")
config = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
ORTQuantizer.from_pretrained("fp32").quantize(quantization_config=config, save_dir="int8")
