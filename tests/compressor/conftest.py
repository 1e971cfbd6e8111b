"""Tiny random models of every supported architecture, in float64 where exactness is asked."""

import copy
from dataclasses import replace
from itertools import chain

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from compressor.compression import compression_of
from compressor.errors import UserError
from compressor.methods import NAMES, Options, apply
from compressor.methods.selective import ground
from compressor.models.anatomy import layers_of
from compressor.models.architectures import ARCHITECTURES
from compressor.models.modules import EVERYTHING
from compressor.pruning.surgery import Removal
from compressor.selection.choice import choose_places, weight_score
from tests.fast_rows import SIMILAR
from tests.tiny import own_keys

HEADS, NEURONS, LAYERS = 4, 20, 3
OPTIONS = Options(rank=2, alpha=4.0, bottleneck=3, length=2)


GATED = "t5-gated"
EXTRA = {name: own_keys(name, layers=LAYERS, neurons=NEURONS) for name in (*ARCHITECTURES, GATED)}
TRIED = sorted([*ARCHITECTURES, GATED])
"""Every architecture, and T5 in the form of T5 v1.1 and flan-t5."""


def tiny(
    model_type: str, dtype: torch.dtype = torch.float64, seed: int = 0, auto: type = AutoModelForSequenceClassification, **keys
):
    """A random model: 3 layers, hidden 32, 4 heads, 20 neurons, weights large enough for differences to show.

    `auto` is the Auto class that makes it, `keys` are of its config.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type.removesuffix("-gated"),
        **{
            "hidden_size": 32,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": NEURONS,
            "vocab_size": 99,
            "max_position_embeddings": 64,
            "initializer_range": 0.2,
            "num_labels": 3,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "pad_token_id": 1,
            "decoder_start_token_id": 1,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            **EXTRA[model_type],
            **keys,
        },
    )
    model = auto.from_config(config).to(dtype).eval()
    prefix = f"{model.base_model_prefix}."
    compression_of(model).head_parameters = frozenset(
        name for name, _ in model.named_parameters() if not name.startswith(prefix)
    )
    return model


def encoding(rows: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
    """Right-padded random rows of unequal length."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, 99, (rows, length), generator=generator)
    attention_mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(1, rows):
        attention_mask[row, length - 2 * row :] = 0
    input_ids[attention_mask == 0] = 1
    input_ids[torch.arange(rows), attention_mask.sum(dim=1) - 1] = 3  # T5 reads its answer at the one end of sentence
    input_ids[input_ids.eq(3) & attention_mask.cumsum(1).ne(attention_mask.sum(1, keepdim=True))] = 4
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def logits(model) -> torch.Tensor:
    """Of `encoding()`, (rows, classes), dropout and gates at rest."""
    with torch.no_grad():
        return model.eval()(**encoding()).logits


PLAN = {0: Removal([1], [0, 5, 7]), 1: Removal(whole=True), 2: Removal([0], list(range(NEURONS)))}
"""Unequal, a sublayer emptied, a block gone."""
DECODER_PLAN = {4: Removal(whole=True), 5: Removal([0], cross_heads=list(range(HEADS)))}
"""The same of a T5's decoder."""


def plan_of(architecture: str) -> dict[int, Removal]:
    """PLAN, for both stacks where there are two."""
    return {**PLAN, **DECODER_PLAN} if architecture.startswith("t5") else PLAN


def empty_plan(architecture: str) -> dict[int, Removal]:
    """Every unit of one block of each stack, the first that may lose them: chance hardly ever draws that."""
    layers = layers_of(tiny(architecture))
    first = int(layers[0].needed)
    return {
        number: Removal(**{structure: list(range(layer.units(structure))) for structure in layer.structures})
        for number, layer in enumerate(layers)
        if number % LAYERS == first
    }


CUTS = {"unequal": plan_of, "empty": empty_plan}
"""The plans that every way of running, counting and storing a cut model is tried with."""


CASES: dict[str, tuple[str, dict]] = {
    **{name: (name, {}) for name in NAMES},
    "adapter-houlsby": ("adapter", {"placement": "houlsby"}),
    "adapter-adapterhub": ("adapter", {"placement": "adapterhub"}),
    "prefix-reparametrized": ("prefix", {"reparametrize": True}),
    "propetl-lora": ("propetl", {"shared": "lora"}),
    "propetl-prefix": ("propetl", {"shared": "prefix", "keep": 0.3}),
    "propetl-prefix-reparametrized": ("propetl", {"shared": "prefix", "reparametrize": True}),
    "propetl-only-mask": ("propetl", {"share": False}),
    "propetl-lora-random": ("propetl", {"shared": "lora", "masks": "random"}),
    "full-top": ("full", {"top": 2}),
    "selective-on-lora": ("selective", {"on": "lora"}),
    "selective-on-adapter": ("selective", {"on": "adapter", "placement": "houlsby"}),
    "selective-everything": ("selective", {"modules": EVERYTHING}),
    "mixout": ("mixout", {"mixout": 0.5}),
    "diff_pruning": ("diff_pruning", {"budget": 60, "penalty": 1e-4}),
    "diff_pruning-groups": ("diff_pruning", {"budget": 60, "penalty": 1e-4, "group_gates": True, "renew": 2}),
    "child_tuning-d": ("child_tuning", {"child": "d"}),
    "child_tuning-pruning": ("child_tuning", {"child": "pruning", "budget": 60}),
}
"""Every method, and every kind of it: case -> (method, options). A new one is one row."""

GROWING: dict[str, tuple[str, dict]] = {
    "id3": ("selective", {"strategy": "increment", "budget": 40}),
    "id3-exact": ("selective", {"strategy": "increment", "budget": 0.02, "schedule": "exact", "exp": -1.0, "eps": 0.5}),
    "repeat": ("selective", {"strategy": "repeat", "budget": 40}),
    "id3-everything": ("selective", {"strategy": "increment", "budget": 40, "modules": EVERYTHING}),
    "repeat-freeze": ("selective", {"strategy": "repeat", "budget": 40, "deselected": "freeze"}),
    "id3-on-lora": ("selective", {"strategy": "increment", "budget": 40, "on": "lora"}),
    "id3-on-adapter": ("selective", {"strategy": "increment", "budget": 0.2, "schedule": "exact", "on": "adapter"}),
}
"""Methods that choose while training: they are what they are only after it."""


def prepared(
    model, case: str, modules=("query", "value"), places: int = 5, generator: torch.Generator | None = None
) -> Options:
    """Apply a case to a model, with random places where it takes some; returns the options."""
    method, kind = {**CASES, **GROWING}[case]
    generator = generator or torch.Generator().manual_seed(2)
    options = replace(OPTIONS, **{"modules": modules, "group": "1", **kind})
    # the tensors of a LoRA or of adapters are there once they are attached: to a copy, or the model would have them twice
    matrices = ground(model if options.on == "weights" else copy.deepcopy(model), options)
    omega = {
        matrix.path: torch.randperm(matrix.original.numel(), generator=generator)[:places].sort().values.to(torch.int32)
        for matrix in matrices
    }
    options = replace(options, omega=omega)
    apply(model, method, options)
    return options


def tuned(model, case: str, modules=("query", "value"), places: int = 5):
    """Apply a case and move its parameters away from the start."""
    generator = torch.Generator().manual_seed(2)
    prepared(model, case, modules, places, generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name not in compression_of(model).head_parameters:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.1)
    return model


def top_places(weight: torch.Tensor, score: str, count: int, seed: int) -> torch.Tensor:
    """Ω of one matrix (out, in) alone: `count` sorted flat int32 indices. Raises UserError E401, E409."""
    return choose_places([weight_score(weight, score, seed)], count, "this matrix")[0]


FEW = {
    "propetl-prefix-reparametrized",
    "propetl-only-mask",
    "propetl-lora-random",
    "diff_pruning-groups",
    "child_tuning-pruning",
    "full-top",
}
"""Variants that differ in their training alone: tried on two architectures, of separate and of fused, transposed weights."""


PREFIX_CASES = ("prefix", "prefix-reparametrized", "propetl-prefix", "mam")
REFUSED: dict[str, tuple[str, ...]] = {
    "bitfit": ("llama", "modernbert", "qwen3", "t5", "t5-gated"),
    "adapter-adapterhub": ("gpt2", "llama", "modernbert", "qwen3", "t5", "t5-gated"),
    **{case: ("deberta-v2", "mpnet", "t5", "t5-gated") for case in PREFIX_CASES},
}
"""Case -> architectures that it does not apply to (E407): they have no biases, no such sublayers, or other attention."""
ASKED = ("bert", "roberta", "xlm-roberta", "electra", "distilbert", *sorted(set(chain(*REFUSED.values()))))
"""The architectures that this table was made for; any other one is built and asked, which takes a while."""


def applies(case: str, name: str) -> bool:
    """Whether a case can be used with an architecture."""
    if name in ASKED:
        return name not in REFUSED.get(case, ())
    try:
        prepared(tiny(name), case)
    except UserError as error:
        if error.code != "E407":
            raise
        return False
    return True


def _pairs(case: str) -> list[str]:
    """The architectures that a case is tried on."""
    return [name for name in (("bert", "gpt2") if case in FEW else TRIED) if applies(case, name)]


APPLIES = [(case, architecture) for case in CASES for architecture in _pairs(case)]
"""Every pair that can be."""


def _is_fast_pair(case: str, architecture: str) -> bool:
    """Whether a pair belongs to the fast tests: every method on every third architecture, so that each has several others."""
    if architecture in SIMILAR:
        return False
    return case in FEW or (list(CASES).index(case) + TRIED.index(architecture)) % 3 == 0


def _fast_architecture(case: str) -> str:
    """One of the fast pairs of a case: another place in the list for each case, so that all architectures come."""
    fast = [name for name in _pairs(case) if _is_fast_pair(case, name)]
    return fast[list(CASES).index(case) % len(fast)]


@pytest.fixture(params=TRIED)
def architecture(request) -> str:
    return request.param


@pytest.fixture(params=CUTS)
def cut(request, architecture) -> dict[int, Removal]:
    """What goes, for this architecture."""
    return CUTS[request.param](architecture)


@pytest.fixture(
    params=[pytest.param(pair, marks=() if _is_fast_pair(*pair) else pytest.mark.slow, id="-".join(pair)) for pair in APPLIES]
)
def pair(request) -> tuple[str, str]:
    """(case, architecture)."""
    return request.param


@pytest.fixture(
    params=[
        pytest.param((case, name), marks=() if name == _fast_architecture(case) else pytest.mark.slow, id=f"{case}-{name}")
        for case, name in APPLIES
    ]
)
def pair_of_case(request) -> tuple[str, str]:
    """(case, architecture), of which the fast tests have one of each case: for what differs little between architectures."""
    return request.param


@pytest.fixture(params=[*CASES, *GROWING])
def case(request) -> str:
    return request.param
