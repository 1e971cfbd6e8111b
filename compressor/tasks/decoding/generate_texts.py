"""Texts that a model in memory generates for prompts, by transformers' `generate`: batched, without sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from compressor.accelerator import accelerated
from compressor.models.special_tokens import start_id
from compressor.tasks.decoding.decode_config import DecodeConfig
from compressor.tasks.features import batches, pad

if TYPE_CHECKING:
    import torch
    from torch import nn

SEQUENCES = {"cpu": 32, "cuda": 256}
"""Sequences of a batch, prompts times beams, by the type of the device. A GPU launches a step for few as long as for many; of
SmolLM2-135M the caches of so many, 128 tokens each, are 1.5 GB."""


def generate_texts(
    model: nn.Module,
    tokenizer,
    prompts: Sequence[list[int]],
    config: DecodeConfig,
    pad_id: int,
    on_batch: Callable[[int], None] = lambda prompts: None,
) -> list[str]:
    """The generated text of every prompt (its tokens), without surrounding whitespace, up to the tokenizer's end token.

    Prompts of a decoder are padded on the left, those of an encoder on the right. Settings in the model's
    generation_config.json, such as a temperature, are not used.
    """
    import torch
    from torch.nn.utils import parametrize
    from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig

    settings = GenerationConfig(
        do_sample=False,
        num_beams=config.beams,
        max_new_tokens=config.max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pad_id,
        use_cache=True,
        **({"decoder_start_token_id": start_id(model.config, pad_id)} if model.config.is_encoder_decoder else {}),
        **({"length_penalty": config.length_penalty} if config.beams > 1 else {}),
    )
    model.eval()
    behind_encoder, texts = model.config.is_encoder_decoder, [""] * len(prompts)
    theirs, model.generation_config = model.generation_config, GenerationConfig()
    try:
        # cached: a changed weight is computed once, not again for every token
        with accelerated(model) as device, torch.inference_mode(), parametrize.cached():
            for chosen in batches([{"input_ids": prompt} for prompt in prompts], prompts_of_a_batch(config, device)):
                inputs = _padded([prompts[number] for number in chosen], pad_id, device, left=not behind_encoder)
                # behind an encoder only the start token comes before what is generated
                length = 1 if behind_encoder else inputs["input_ids"].shape[1]
                inputs["logits_processor"] = _limits(config, length)
                if behind_encoder:  # the cache that generate makes has no more blocks than the encoder, this one grows
                    inputs["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
                generated = model.generate(**inputs, generation_config=settings)[:, length:]
                for number, tokens in zip(chosen, generated.tolist(), strict=True):
                    texts[number] = _text_of(tokens, tokenizer)
                on_batch(len(chosen))
    finally:
        model.generation_config = theirs
    return texts


def prompts_of_a_batch(config: DecodeConfig, device: torch.device) -> int:
    """How many prompts are generated for at a time on a device."""
    return max(1, SEQUENCES.get(device.type, SEQUENCES["cpu"]) // config.beams)


def _limits(config: DecodeConfig, length: int) -> list:
    """The limit of repeated n-grams, within what is generated after the first `length` tokens: prompts may be copied."""
    from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor

    if not config.no_repeat_ngram:
        return LogitsProcessorList()
    within = NoRepeatNGramLogitsProcessor(config.no_repeat_ngram)
    return LogitsProcessorList([lambda input_ids, scores: within(input_ids[:, length:], scores)])


def _text_of(tokens: list[int], tokenizer) -> str:
    """The text of generated tokens up to the end token."""
    # what follows the end is padding, which need not be a special token
    until = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else len(tokens)
    # as the server writes it: some tokenizer_config.json ask that the space before a full stop is taken out
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return tokenizer.decode(tokens[:until], **options).strip()


def _padded(prompts: Sequence[list[int]], pad_id: int, device, left: bool) -> dict:
    """input_ids and attention_mask (prompts, longest), padded on the left or on the right."""
    import torch

    step = -1 if left else 1
    rows = [{"input_ids": prompt[::step], "attention_mask": [1] * len(prompt)} for prompt in prompts]
    # padded on the right; a prompt in reverse order is then reversed again
    return {key: torch.tensor(values[:, ::step].copy(), device=device) for key, values in pad(rows, pad_id).items()}
