"""Pruned checkpoints in transformers' Auto classes: `import compressor.models.auto`, then AutoModel... as usual.

A pruned BERT's config.json says `compressed-bert`. Its classes are made here from the stock ones and registered with
AutoConfig, AutoModel and the Auto classes of classifiers (of sequences, of tokens) and, for GPT-2, Llama and T5, of models that
generate; no stock class is touched. Registering takes the stock classes,
and so transformers and torch: that is why `import compressor` alone, which is light, does not do it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_MAPPING,
    TOKENIZER_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
)

from compressor.compression import compression_of
from compressor.errors import UserError
from compressor.models.architectures import ARCHITECTURES, COMPRESSED, row_of
from compressor.models.tasks_table import HEAD_TASKS, auto_model_of
from compressor.pruning.sizes import BY_STACK, Sizes, resize
from compressor.pruning.surgery import kept_of

# transformers also has each table under a name of its own, MODEL_FOR_..._MAPPING
HEADS = {auto: auto._model_mapping for auto in map(auto_model_of, HEAD_TASKS)}
"""The task heads that a checkpoint may have: Auto class -> its table of stock models."""


def class_for(config: PretrainedConfig) -> type:
    """The Auto class of the class that `config.architectures` names, pruned or not. Raises UserError E308 for any other."""
    name = (config.architectures or ["(none)"])[0]
    for auto, models in HEADS.items():
        if type(config) in models and models[type(config)].__name__ == name:
            return auto
    what = f"'{name}' in config.json's architectures is not a model class that is loaded here"
    raise UserError("E308", what, "It must be a classifier of sequences or tokens, or one that generates")


class CompressedConfig:
    """Mixin of a stock config. `kept_sizes` is what config.json calls `per_layer_config` (pruning/sizes.py): under that name
    transformers would forbid to read the dense model's keys, which building a model does.
    """

    def __post_init__(self, per_layer_config: Sizes | None = None, **keywords: Any) -> None:
        super().__post_init__(**keywords)
        self.kept_sizes = per_layer_config or {}

    def to_dict(self) -> dict[str, Any]:
        content = super().to_dict()
        sizes = content.pop("kept_sizes")
        return {**content, BY_STACK[0]: sizes}


class Compressed:
    """Mixin of a stock model: it is built dense, then pruned to the sizes of its config, before any weight is read."""

    def __init__(self, config: PretrainedConfig, *arguments: Any, **keywords: Any) -> None:
        super().__init__(config, *arguments, **keywords)
        # Llama's classifier gets its base from AutoModel, which gives one of these
        if kept := kept_of(self.base_model):
            compression_of(self).kept = kept
            return
        # the model may be made on meta; the indices that say what goes are numbers
        with torch.device("cpu"):
            resize(self, {BY_STACK[0]: config.kept_sizes, BY_STACK[1]: getattr(config, BY_STACK[1], {})})

    @classmethod
    def from_pretrained(cls, *arguments: Any, output_loading_info: bool = False, **keywords: Any) -> Any:
        """As in transformers, but strict. Raises UserError E305 when the file lacks tensors or has those of another model."""
        model, info = super().from_pretrained(*arguments, output_loading_info=True, **keywords)
        missing, strange = info["missing_keys"], info["unexpected_keys"]
        bare = model.base_model is model and model.get_output_embeddings() is None  # a T5 that generates is its own base
        if bare:  # the head is left out, and a pooler may be fresh: transformers tells so
            missing, strange = [name for name in missing if not name.startswith("pooler.")], ()
        if odd := sorted({*missing, *strange})[:3]:
            raise UserError(
                "E305", f"tensors missing or unexpected: {', '.join(odd)}", "The folder is damaged", model.name_or_path
            )
        return (model, info) if output_loading_info else model


def register(model_type: str) -> None:
    """Make the classes of an architecture's pruned checkpoints known to the Auto classes, once."""
    if COMPRESSED + model_type in CONFIG_MAPPING:
        return
    stock = CONFIG_MAPPING[model_type]
    config = _made(stock, CompressedConfig, model_type=COMPRESSED + model_type)
    AutoConfig.register(config.model_type, config)
    heads = dict(HEADS)
    if not row_of(model_type).head_on_tokens:  # encoders have such a class, too, that hardly anyone generates with
        del heads[AutoModelForCausalLM]
    for auto, models in {AutoModel: MODEL_MAPPING, **heads}.items():
        if stock in models:
            auto.register(config, _made(models[stock], Compressed, config_class=config))
    if tokenizer := TOKENIZER_MAPPING.get(stock, None):
        AutoTokenizer.register(config, tokenizer_class=tokenizer)


def _made(stock: type, joined: type, **attributes: Any) -> type:
    """Create a class of this module: the stock one with the mixin `joined`; config.json's `architectures` names it."""
    made = type(f"Compressed{stock.__name__}", (joined, stock), {"__module__": __name__, **attributes})
    globals()[made.__name__] = made
    return made


for _model_type in ARCHITECTURES:
    register(_model_type)
