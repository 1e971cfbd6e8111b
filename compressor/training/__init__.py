"""Training on Hugging Face's Trainer: distillation, many tasks, resuming."""
