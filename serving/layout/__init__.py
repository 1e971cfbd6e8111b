"""What a model repository contains: configs, the facts of a version, warm-up requests."""
