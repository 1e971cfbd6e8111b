"""The files of a pretrained model: its folder, config.json and weights, checked before anything is built of them."""
