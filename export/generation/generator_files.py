"""The files of a generative model, and the check that they generate the same tokens as the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from torch import nn

from compressor.models.special_tokens import start_id
from compressor.tasks.features import Encoding, pad
from export.generation.greedy import generate
from export.graph.files import carry_over, save
from export.graph.rewrite import fused
from export.graph.weight_only import quantized_weights
from export.parity.bounds import kind_on
from export.parity.compare import ParityResult, require
from export.parity.sides import runs
from export.parity.suspects import suspect_in_graph
from export.parity.token_outputs import compare_tokens
from export.runtimes.decoders import Decoder
from export.runtimes.sessions import session

if TYPE_CHECKING:
    from export.runtimes.decoders import Live
    from export.standalone.source_model import LoadedModel

PROMPTS, LONGEST, NEW = 8, 24, 24
"""Number of random prompts, tokens of the longest, and tokens generated after each."""


def write_generator(
    graphs: Mapping[str, onnx.ModelProto], folder: Path, *, precisions: Sequence[str], fuse: bool, limit: int
) -> dict[str, tuple[Path, ...]]:
    """Write FOLDER/NAME.onnx, NAME_int8.onnx and NAME_int4.onnx of every graph; precision -> paths, in order of `graphs`."""
    paths: dict[str, tuple[Path, ...]] = {}
    for name, graph in graphs.items():
        fp32 = fused(graph) if fuse else graph
        for precision in precisions:
            path = folder / (f"{name}.onnx" if precision == "fp32" else f"{name}_{precision}.onnx")
            made = fp32 if precision == "fp32" else quantized_weights(fp32, int(precision.removeprefix("int")))
            carry_over(graph, made)
            save(made, path, limit)
            paths[precision] = (*paths.get(precision, ()), path)
    return paths


def special_tokens(loaded: LoadedModel) -> dict[str, Any]:
    """The special tokens that `generate` needs: those that end a text, pad it, and begin the text after an encoder."""
    config, generation = loaded.model.config, loaded.model.generation_config
    ends = config.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    start = generation.decoder_start_token_id if config.is_encoder_decoder else None
    return {
        "ends": [] if ends is None else [ends] if isinstance(ends, int) else list(ends),
        "pad": loaded.pad_id,
        "start": start_id(config, loaded.pad_id) if start is None and config.is_encoder_decoder else start,
    }


@dataclass(frozen=True)
class Text:
    """Tokens int64 (rows, length) and their mask, and the inputs of an encoder if there is one."""

    ids: np.ndarray
    mask: np.ndarray
    source: Encoding | None

    def rows(self) -> list[Text]:
        """Each row as a text without padding."""
        alone = []
        for row, mask in enumerate(self.mask):
            real = None if self.source is None else self.source["attention_mask"][row] == 1
            source = (
                None if self.source is None else {name: values[row : row + 1, real] for name, values in self.source.items()}
            )
            alone.append(Text(self.ids[row : row + 1, mask == 1], self.mask[row : row + 1, mask == 1], source))
        return alone

    def turned(self) -> Text:
        """The same text, with the padding of its tokens on the left."""
        return self._in_order(self.mask)

    def parted(self, last: int) -> Text:
        """The same text, with the padding of each row before its `last` tokens."""
        following = self.mask.sum(axis=1, keepdims=True) - self.mask.cumsum(axis=1)
        return self._in_order(np.where(self.mask == 0, 1, 2 * (following < last)))

    def _in_order(self, places: np.ndarray) -> Text:
        """The same text, the tokens of each row sorted by `places` (rows, length)."""
        order = np.argsort(places, axis=1, kind="stable")
        return Text(np.take_along_axis(self.ids, order, 1), np.take_along_axis(self.mask, order, 1), self.source)


Refuse = Callable[[ParityResult, Callable[[], str]], None]
"""Raises for a comparison that failed; only then the function that it is given finds the layer."""


def prove_generator(
    loaded: LoadedModel, precision: str, paths: Sequence[Path], refuse: Refuse | None = require
) -> dict[str, Any]:
    """The record of `compare_generated`, with `generated` and `generated_agreement`. Raises CheckError E610, E611 where a file
    does not run, UserError E602 where it cannot be opened."""
    with runs(f"PyTorch -> {paths[-1].name}"):
        result, agreed = compare_generated(loaded, precision, paths, refuse)
    return {**result.to_json(), "generated": len(agreed), "generated_agreement": float(np.mean(agreed))}


def compare_generated(
    loaded: LoadedModel, precision: str, paths: Sequence[Path], refuse: Refuse | None
) -> tuple[ParityResult, list[bool]]:
    """Compare a file (or encoder and decoder) with its model: the comparison, and which generated tokens agreed.

    The files generate after random prompts; PyTorch then processes the complete texts at once, without a cache. Its logits are
    compared with those of the graph with an empty cache, with a filled one, in batches of 1, with padding on the other side,
    and, without an encoder, in between, as behind a shorter prompt. A generated token counts as agreement if it is also
    PyTorch's likeliest after the same tokens: if all are, PyTorch generates the same text. `refuse`, if any, raises CheckError
    E610 that names the block where they diverge, or the cache.
    """
    live = session(paths[-1])
    text, chosen = _texts(loaded, live)
    reference = torch_logits(loaded.model, text)
    middle = max(1, text.ids.shape[1] // 2)
    others = {
        "batch 1": np.concatenate([logits_of(live, row) for row in text.rows()]),
        "on a past": logits_of(live, text, middle),
        "padded on the left": logits_of(live, text.turned(), middle),
    }
    if text.source is None:
        others["padded in between"] = logits_of(live, text.parted(text.ids.shape[1] - middle), middle)
    kind = kind_on(precision, "random tokens")
    references = dict.fromkeys(others, reference)
    if text.source is not None:
        # behind an encoder some count a text's padding as positions, such as BART, in PyTorch, too
        references["padded on the left"] = torch_logits(loaded.model, text.turned())
    compared = partial(compare_tokens, f"PyTorch -> {paths[-1].name}", kind, reference, logits_of(live, text))
    result = compared(batches=(references, others))

    def suspect() -> str:
        if compared().passed and "batch 1" not in result.failed_batches:
            return "the cache: without a past nothing parts"
        return _suspected_block(loaded, paths[-1], text, result.worst_row)

    if refuse is not None:
        refuse(result, suspect)
    likeliest = np.zeros((*text.ids.shape, 1), np.int64)
    likeliest[text.mask == 1] = reference.argmax(axis=-1, keepdims=True)
    agreed = [bool(likeliest[row, place, 0] == token) for row, place, token in chosen]
    return result, agreed


def _suspected_block(loaded: LoadedModel, path: Path, text: Text, worst: int) -> str:
    """The block where a file and its model diverge in one pass without a past, over the worst token's row and the longest."""
    lengths = text.mask.sum(axis=1)
    chosen = [np.repeat(np.arange(len(lengths)), lengths)[worst], lengths.argmax()]
    return suspect_in_graph(loaded.model, path, {"input_ids": text.ids[chosen], "attention_mask": text.mask[chosen]})


def _texts(loaded: LoadedModel, live: Live) -> tuple[Text, list[tuple[int, int, int]]]:
    """Prompts followed by their generated tokens, and (row, position before it, token) of each of these."""
    most = getattr(loaded.model.config, "max_position_embeddings", None) or LONGEST + NEW
    longest, new = min(LONGEST, most // 2), min(NEW, most // 2)
    fitting = [row for row in loaded.rows if len(row["input_ids"]) <= longest]
    keys = ("input_ids", "attention_mask")
    prompts = [{key: fitting[place][key] for key in keys} for place in np.linspace(0, len(fitting) - 1, PROMPTS).astype(int)]
    special, source = special_tokens(loaded), pad(prompts, loaded.pad_id)
    tokens = generate(live, *source.values(), new, pad=special["pad"], start=special["start"])
    if loaded.model.config.is_encoder_decoder:
        before = [[special["start"]]] * len(prompts)
        # of different lengths, or no row would be padded
        tokens = [ids[: max(1, len(ids) - row % 4)] for row, ids in enumerate(tokens)]
    else:
        before = [row["input_ids"] for row in prompts]
    rows = [[*start, *ids.tolist()] for start, ids in zip(before, tokens, strict=True)]
    made = pad([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], loaded.pad_id)
    chosen = [(row, len(before[row]) - 1 + place, token) for row, ids in enumerate(tokens) for place, token in enumerate(ids)]
    return Text(*made.values(), source if loaded.model.config.is_encoder_decoder else None), chosen


def logits_of(live: Live, text: Text, *cuts: int) -> np.ndarray:
    """Logits (tokens, vocabulary) of a text, row after row, run at once or split at `cuts`: later pieces then run on a past."""
    decoder = Decoder(live, len(text.ids)) if text.source is None else live.started(**text.source)
    pieces = [decoder(text.ids[:, a:b], text.mask[:, a:b]) for a, b in pairwise((0, *cuts, text.ids.shape[1]))]
    return np.concatenate(pieces, axis=1)[text.mask == 1]


def torch_logits(model: nn.Module, text: Text) -> np.ndarray:
    """Logits of a torch model without a cache, in the format of `logits_of`."""
    ids, mask = torch.from_numpy(text.ids), torch.from_numpy(text.mask)
    if text.source is None:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    else:
        source = {name: torch.from_numpy(values) for name, values in text.source.items()}
        inputs = {**source, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    with torch.inference_mode():
        logits = model.eval()(**inputs, use_cache=False).logits
    return logits.float().numpy()[text.mask == 1]
