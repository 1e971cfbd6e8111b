"""A generative model -> ONNX, with its key and value cache as inputs and outputs, each decoder weight stored once.

There is one graph for the prompt and for each token after it: a prompt is run with an empty past (0 tokens long). A decoder:
`input_ids` and `position_ids` (batch, sequence), `attention_mask` (batch, past + sequence) and the past (batch, heads, past,
head size) to `logits` and `present`, the past of the next call. Padding may be on either side, or in between: the mask is 0
there, and position ids count the other tokens. An encoder with a decoder: two graphs. The first outputs the keys and values
that the second attends to, so it contains their matrices; the second has no position ids. Names follow optimum's:
`past_key_values.0.key`, `present.0.key`; with an encoder `.decoder.key` and `.encoder.key`. A block without attention has
neither.
"""

from __future__ import annotations

import onnx
import torch
from optimum.utils.input_generators import DummyTextInputGenerator
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from compressor.models.normalized import normalized
from export.graph.attention import plain_attention
from export.graph.exportable import no_keys_and_values, require_growing
from export.graph.trace import AXES, trace_named, unchanged
from export.runtimes.runtime import DECODER, ENCODER

BATCH, SEQUENCE, PAST, SOURCE = 2, 3, 5, 7
"""Sizes of the sample that is traced: all different, none 1."""
STATES = ("batch", None, "past", None)

Block = dict[str, Tensor]
Blocks = dict[str, Block]
"""Number of a block -> its key and value (batch, heads, tokens, head size)."""


def trace_generator(model: nn.Module) -> dict[str, onnx.ModelProto]:
    """The unfused graphs of a generative model: `model`, or `encoder_model` and `decoder_model`.

    Raises UserError E623 for a model whose cache holds anything but keys and values that grow with the tokens, or none.
    """
    if model.config.is_encoder_decoder:
        return {ENCODER: trace_encoder(model), DECODER: trace_decoder(model)}
    step = Step(model, _shapes(_sample_cache(model)))
    inputs = {
        "input_ids": _sample_ids(model),
        "attention_mask": torch.ones(BATCH, PAST + SEQUENCE, dtype=torch.long),
        "position_ids": torch.arange(PAST, PAST + SEQUENCE).expand(BATCH, SEQUENCE).clone(),
        "past_key_values": _random(step.shapes, PAST),
    }
    axes = {
        "attention_mask": ("batch", "past + sequence"),
        **dict.fromkeys(("input_ids", "position_ids"), ("batch", "sequence")),
    }
    axes |= {f"past_key_values.{number}.{name}": STATES for number in step.shapes for name in ("key", "value")}
    return {"model": trace_named(step, inputs, axes)}


class Step(nn.Module):
    """A decoder step on a past (cache). `shapes`: number of a block with attention -> (heads, head size)."""

    def __init__(self, model: nn.Module, shapes: dict[str, tuple[int, int]]):
        super().__init__()
        self.model, self.config, self.shapes = model, model.config, shapes

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: Blocks) -> dict:
        cache = _cache(past_key_values)
        states = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": cache, "use_cache": True}
        logits = self.model(input_ids=input_ids, **states).logits
        return {"logits": logits, "present": {number: _states(cache.layers[int(number)]) for number in past_key_values}}


def trace_encoder(model: nn.Module) -> onnx.ModelProto:
    """(batch, sequence) ids and mask -> `present.N.encoder.key` and value (batch, heads, sequence, head size)."""
    inputs = {name: torch.ones(BATCH, SOURCE, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    with unchanged(model):
        crossed = list(_crossed(_sample_cache(model)))
        with plain_attention(model):
            return trace_named(EncoderGraph(model, crossed), inputs, dict.fromkeys(inputs, AXES))


class EncoderGraph(nn.Module):
    """An encoder with the keys and values of the decoder's cross-attention. `crossed`: the blocks that attend to it."""

    def __init__(self, model: nn.Module, crossed: list[str]):
        super().__init__()
        self.model, self.config, self.crossed = model, model.config, crossed

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict:
        # other outputs of the decoder are not requested, so they are not in the graph
        start = input_ids.new_zeros(input_ids.shape[0], 1)
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=start, use_cache=True)
        layers = outputs.past_key_values.cross_attention_cache.layers
        return {"present": {number: {"encoder": _states(layers[int(number)])} for number in self.crossed}}


def trace_decoder(model: nn.Module) -> onnx.ModelProto:
    """The decoder's graph: `input_ids` (batch, sequence), `attention_mask` (batch, past + sequence), `encoder_attention_mask`
    (batch, source), the past and the encoder's keys and values -> `logits` and `present.N.decoder.key` and value.
    """
    with unchanged(model):
        sample = _sample_cache(model)
    decoded, crossed = _shapes(sample.self_attention_cache), _crossed(sample)
    past = {number: {"decoder": block} for number, block in _random(decoded, PAST).items()}
    for number, block in _random(crossed, SOURCE).items():
        past.setdefault(number, {})["encoder"] = block
    inputs = {
        "input_ids": _sample_ids(model),
        "attention_mask": torch.ones(BATCH, PAST + SEQUENCE, dtype=torch.long),
        "encoder_attention_mask": torch.ones(BATCH, SOURCE, dtype=torch.long),
        "past_key_values": past,
    }
    axes = {
        "input_ids": ("batch", "sequence"),
        "attention_mask": ("batch", "past + sequence"),
        "encoder_attention_mask": ("batch", "source"),
    }
    both = {"decoder": (decoded, STATES), "encoder": (crossed, ("batch", None, "source", None))}
    for side, (shapes, names) in both.items():
        axes |= {f"past_key_values.{number}.{side}.{name}": names for number in shapes for name in ("key", "value")}
    return trace_named(StepBehindEncoder(model), inputs, axes)


class StepBehindEncoder(nn.Module):
    """A decoder step on its past and on the keys and values of an encoder."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        encoder_attention_mask: Tensor,
        past_key_values: dict[str, dict[str, Block]],
    ) -> dict:
        sides = [{n: sides[name] for n, sides in past_key_values.items() if name in sides} for name in ("decoder", "encoder")]
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        cache.self_attention_cache, cache.cross_attention_cache = map(_cache, sides)
        cache.is_updated = dict.fromkeys(map(int, sides[1]), True)
        # only its shape is used: everything computed from it is in the cache
        seen = torch.zeros(*encoder_attention_mask.shape, 1)
        outputs = self.model(
            decoder_input_ids=input_ids,
            decoder_attention_mask=attention_mask,
            encoder_outputs=BaseModelOutput(last_hidden_state=seen),
            attention_mask=encoder_attention_mask,
            past_key_values=cache,
            use_cache=True,
        )
        layers = cache.self_attention_cache.layers
        return {"logits": outputs.logits, "present": {n: {"decoder": _states(layers[int(n)])} for n in sides[0]}}


def _cache(blocks: Blocks) -> DynamicCache:
    """The cache that holds `blocks`; blocks in between, without attention, hold zeros as in `compressor.pruning.emptied`."""
    cache, like = DynamicCache(), next(iter(blocks.values()))["key"]
    for number in range(max(map(int, blocks)) + 1):
        nothing = like.new_zeros(like.shape[0], 1, like.shape[2], 1)
        states = blocks.get(str(number), {"key": nothing, "value": nothing})
        layer = DynamicLayer()
        layer.keys, layer.values, layer.is_initialized = states["key"], states["value"], True
        layer.dtype, layer.device = like.dtype, like.device
        cache.layers.append(layer)
    return cache


def _states(layer: DynamicLayer) -> Block:
    return {"key": layer.keys, "value": layer.values}


def _sample_ids(model: nn.Module) -> Tensor:
    """Random tokens (BATCH, SEQUENCE): which they are does not matter to a graph."""
    sizes = {"batch_size": BATCH, "sequence_length": SEQUENCE}
    return DummyTextInputGenerator("text-generation", normalized(model.config), **sizes).generate("input_ids", framework="pt")


@torch.no_grad()
def _sample_cache(model: nn.Module) -> DynamicCache | EncoderDecoderCache:
    """The model's cache after some sample tokens."""
    ids = _sample_ids(model)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **more).past_key_values


def _crossed(cache: EncoderDecoderCache) -> dict[str, tuple[int, int]]:
    """`_shapes` of the blocks that attend to the encoder. Raises UserError E623."""
    return _shapes(cache.cross_attention_cache, "no block of the decoder attends to the encoder")


def _shapes(cache: DynamicCache, none: str = "no block has attention") -> dict[str, tuple[int, int]]:
    """Number of a block -> (heads, head size), for blocks with attention. Raises UserError E623: `none`, if there are none."""
    require_growing(cache)
    layers = {str(number): layer for number, layer in enumerate(cache.layers) if layer.is_initialized}
    shapes = {number: (layer.keys.shape[1], layer.keys.shape[3]) for number, layer in layers.items() if not _is_emptied(layer)}
    if not shapes:
        raise no_keys_and_values(none)
    return shapes


def _is_emptied(layer: DynamicLayer) -> bool:
    """Whether the zeros of `compressor.pruning.emptied` are all that a block wrote: one head of size 1 may be a real one."""
    return layer.keys.shape[1] * layer.keys.shape[3] == 1 and not (layer.keys.any() or layer.values.any())


def _random(shapes: dict[str, tuple[int, int]], tokens: int) -> Blocks:
    """Random keys and values of a sample."""
    return {
        number: {name: torch.randn(BATCH, heads, tokens, size) for name in ("key", "value")}
        for number, (heads, size) in shapes.items()
    }
