"""sentence-transformers' exporters for OpenVINO: fp32, and static int8 calibrated on training rows."""

import shutil
from pathlib import Path

from sentence_transformers import CrossEncoder, export_static_quantized_openvino_model

model = CrossEncoder("model", backend="openvino", model_kwargs={"export": True})
model.save_pretrained("fp32")
# a folder that `datasets` reads as a data set with a split "train"
Path("rows").mkdir()
shutil.copy("train.tsv", "rows/train.tsv")
rows = {"dataset_name": "rows", "dataset_config_name": "default", "dataset_split": "train", "column_name": "text"}
export_static_quantized_openvino_model(model, None, "int8", **rows)
