"""optimum-intel: fp32, and static int8 calibrated on 128 training rows."""

from datasets import Dataset
from optimum.intel import OVConfig, OVModelForSequenceClassification, OVQuantizationConfig, OVQuantizer
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")
model = OVModelForSequenceClassification.from_pretrained("model", export=True, compile=False)
model.save_pretrained("fp32")
rows = Dataset.from_csv("train.tsv", sep="\t").select(range(128))
rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=128), remove_columns=["text", "label"])
config = OVConfig(quantization_config=OVQuantizationConfig(num_samples=128))
OVQuantizer.from_pretrained(model).quantize(calibration_dataset=rows, ov_config=config, save_directory="int8")
