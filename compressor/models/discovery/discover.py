"""Discovery: a row for an architecture that has none, proposed from torch-pruning's traced graph and verified before it is
printed.

Nothing is registered: the row is printed, for a person to check and add to `compressor/models/architectures.py`. For some
architectures (Phi, StableLM) the graph traversal does not terminate, so it runs in its own process, with a time limit.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from compressor.child_program import importing_environment, program
from compressor.errors import CompressError, UserError
from compressor.models.anatomy import layers_of
from compressor.models.architectures import Architecture, Blocks, in_place_of_others
from compressor.models.build import config_of
from compressor.models.discovery.small_model import is_grouped, small_config, small_inputs, small_model, states_of
from compressor.models.discovery.traced_row import BY_HAND, propose
from compressor.models.modules import STRUCTURES
from compressor.models.row_file import ROW
from compressor.pruning.surgery import Removal, remove, silence

SECONDS = 120.0
"""Time limit for the graph of a small model: traversals that terminate take seconds."""
PLANS = 24
BOUND = 1e-12
"""Bound of the largest difference between masked and removed, in float64."""


def discover(folder: Path, seconds: float = SECONDS) -> Architecture:
    """A verified row for the architecture of the pretrained model in `folder`, from its config.json alone.

    Code of the folder never runs. Raises UserError E304 for a folder that cannot be read, E317 where blocks share weights,
    E318 where no row can be proposed or verified, and E319 where the graph traversal takes more than `seconds`.
    """
    config = config_of(folder)
    command = program("compressor.models.discovery.discover", str(folder))
    options = {"capture_output": True, "text": True, "env": importing_environment(), "check": False}
    try:
        done = subprocess.run(command, timeout=seconds, **options)
    except subprocess.TimeoutExpired:
        what = f"torch-pruning's walk over the graph of a '{config.model_type}' did not end in {seconds:.0f} seconds"
        raise UserError("E319", what, BY_HAND, str(folder)) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise UserError("E318", f"no row can be proposed: the search ended by {last:.200}", BY_HAND, str(folder))
    reply = json.loads(done.stdout.splitlines()[-1])
    if "error" in reply:
        raise UserError(*reply["error"], str(folder))
    return ROW.validate_python(reply["row"])


def proven_row(config: PretrainedConfig) -> Architecture:
    """The first proposal of which every trial equals the masked model. Raises UserError E317 and E318."""
    try:
        # torch-pruning's traversal does not terminate with shared key and value heads: only the trial has them
        traced, small = small_config(config, grouped=False), small_config(config, grouped=is_grouped(config))
        model = small_model(traced)
    except Exception as error:  # sizes that the model's code does not accept
        what = f"no row can be proposed: a small model cannot be made of it ({type(error).__name__}: {error!s:.200})"
        raise UserError("E318", what, BY_HAND) from error
    failures = []
    for row in propose(model, traced):
        failure = _failure(row, small)
        if not failure:
            return row
        failures.append(failure)
    raise UserError("E318", f"the proposed row does not hold: {failures[-1]}", BY_HAND)


def prove(row: Architecture, config: PretrainedConfig) -> None:
    """Try a row that somebody wrote on a small random model of this config. Raises UserError E320 where removed units do not
    equal masked ones, E317 where blocks share their weights."""
    if row.model_type != config.model_type:
        what = f"it is the row of '{row.model_type}', and the model is a '{config.model_type}'"
        raise UserError("E320", what, "Give the row of the model's architecture")
    if config.is_encoder_decoder:
        raise UserError("E320", "a model with an encoder and a decoder cannot have its row in a file", BY_HAND)
    try:
        failure = _failure(row, small_config(config, grouped=is_grouped(config)))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        failure = f"no small model can be cut by it ({type(error).__name__}: {error!s:.200})"
    if failure:
        raise UserError("E320", f"the row does not hold: {failure}", BY_HAND)


def _failure(row: Architecture, config: PretrainedConfig) -> str:
    """What differs between masked and removed with this row; '' where nothing does."""
    with in_place_of_others(row):
        layer = layers_of(small_model(config))[0]
        if absent := [name for name in layer.blocks.modules if name not in layer.parts]:
            return f"a block has no {layer.blocks.modules[absent[0]]} for {absent[0]}"
        for plan in _plans(small_model(config), row):
            masked, removed = (small_model(config).double() for _ in range(2))
            silence(masked, plan)
            try:
                remove(removed, plan)
                difference = (states_of(removed, small_inputs()) - states_of(masked, small_inputs())).abs().max().item()
            except CompressError:
                raise
            except Exception as error:  # a wrong cut fails in whatever way the model's code does
                return f"a model without {_described(plan)} ends in {type(error).__name__}: {error!s:.200}"
            if not difference <= BOUND:
                return f"without {_described(plan)}, removed and masked units differ by {difference:.1e}"
    return ""


def _plans(model: nn.Module, row: Architecture) -> Iterator[dict[int, Removal]]:
    """A unit of each structure alone, all of each, a whole block, and then units at random."""
    layers, draw = layers_of(model), random.Random(0)
    units = {name: layers[0].units(name) for name in STRUCTURES if layers[0].units(name)}
    for name, count in units.items():
        yield {0: Removal(**{name: [1]})}
        yield {1: Removal(**{name: list(range(count))})}
    if not row.masks_by_place or len(set(model.config.layer_types)) == 1:
        yield {1: Removal(whole=True)}
    for _ in range(PLANS):
        yield {
            number: Removal(**{name: draw.sample(range(count), draw.randint(0, count)) for name, count in units.items()})
            for number in draw.sample(range(len(layers)), draw.randint(1, len(layers)))
        }


def _described(plan: dict[int, Removal]) -> str:
    parts = [
        f"{name} {', '.join(map(str, removal.of(name)))} of block {number}"
        for number, removal in plan.items()
        for name in STRUCTURES
        if removal.of(name)
    ]
    return "; ".join([*parts, *(f"block {number}" for number, removal in plan.items() if removal.whole)])


def as_code(row: Architecture) -> str:
    """The row as Python, laid out as in `compressor/models/architectures.py`; what a row has by default is left out."""
    return _code(row, "")


def _code(value: Any, indent: str) -> str:
    inner = f"{indent}    "
    if is_dataclass(value):
        arguments = [f"{name}={_code(item, inner)}" if name else _code(item, inner) for name, item in _arguments(value)]
        return f"{type(value).__name__}({_listed(arguments, indent, broken=isinstance(value, Architecture | Blocks))})"
    if isinstance(value, dict):
        items = [f"{_code(key, inner)}: {_code(item, inner)}" for key, item in value.items()]
        return f"{{{_listed(items, indent, broken=len(items) > 2)}}}"
    if isinstance(value, tuple):
        items = [_code(item, inner) for item in value]
        broken = any(map(is_dataclass, value))
        return f"({_listed(items, indent, broken=broken)}{',' if len(items) == 1 and not broken else ''})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _listed(items: list[str], indent: str, *, broken: bool) -> str:
    """Items in one line, or each in a line of its own."""
    return "\n" + "".join(f"{indent}    {item},\n" for item in items) + indent if broken else ", ".join(items)


def _arguments(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, or '' where it goes by position; value) of what a dataclass was made with, defaults left out."""
    for place in fields(value):
        item, default = getattr(value, place.name), place.default
        if default is MISSING and place.default_factory is MISSING:
            yield "", item
        elif item != (place.default_factory() if default is MISSING else default):
            yield place.name, item


def main(folder: str) -> None:
    """The search itself: one line of JSON, the row or an error."""
    try:
        print(json.dumps({"row": ROW.dump_python(proven_row(config_of(Path(folder))), mode="json")}))
    except UserError as error:
        print(json.dumps({"error": [error.code, error.what, error.fix]}))


if __name__ == "__main__":
    main(sys.argv[1])
