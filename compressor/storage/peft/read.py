"""Adapter folders that stock peft wrote: LoRA and Super-Tuning, checked when they are read.

Super-Tuning (arXiv 2607.09287) is peft's name for values on a sparse support plus an optional LoRA, so it can store what
selective tuning and DSEE train. One ratio determines the size of all supports: shorter ones are padded with zeros.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import transformers
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, MODEL_MAPPING_NAMES

from compressor.errors import UserError
from compressor.models.build import SEQUENCES
from compressor.models.files.weight_files import not_finite
from compressor.models.tasks_table import HEAD_TASKS, task_of_class

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."

TASK_TYPES = {task.auto_class: task.peft for task in HEAD_TASKS}
"""peft's task types by Auto class."""
READ_AS = {name: auto_class for auto_class, name in TASK_TYPES.items()} | {"FEATURE_EXTRACTION": SEQUENCES}
"""Auto classes by peft's task type; a base without a task head is read as the base of a classifier."""
BARE = {*MODEL_MAPPING_NAMES.values(), *MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.values()}
"""Names of the model classes without a task head."""

UNDERSTOOD = frozenset(
    [
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "save_precomputed_indices",
        "select_top",
        "sparsity",
        "target_modules",
        "task_type",
        "use_rslora",
    ]
)
"""Config keys that are supported, or that do not affect the outputs of a trained adapter."""

DEFAULTS = {"bias": ("none",), "init_lora_weights": (True, "gaussian")}
"""Values that, like false, empty and null, mean the plain method. Other initializations change the base's weights."""


LAST = re.compile(r"(^|\.)(classifier|score|out_proj)\.weight$")
"""Pattern of the name of a task head's last matrix."""

TENSORS = {
    "LORA": re.compile(r".*\.lora_[AB]\.weight"),
    "SUPERTUNING": re.compile(r".*\.supertuning_(indices|values|lora_[AB]\.weight)"),
}
"""Supported formats, and patterns of their tensor names."""


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"no regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]


class AutoMapping(BaseModel):
    """How peft records the class of the model where the adapter has no task type."""

    base_model_class: str


class AdapterConfig(BaseModel):
    """What is read of adapter_config.json; all other keys are compared with UNDERSTOOD."""

    model_config = ConfigDict(extra="allow", strict=True)

    peft_type: str
    task_type: str | None = None
    auto_mapping: AutoMapping | None = None
    r: int | None = Field(default=None, ge=0)
    lora_alpha: float | None = Field(default=None, allow_inf_nan=False)
    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1)]] | None = None
    alpha_pattern: dict[Pattern, Annotated[float, Field(allow_inf_nan=False)]] | None = None
    use_rslora: bool | None = None

    @model_validator(mode="after")
    def _lora_has_its_numbers(self) -> Self:
        if self.peft_type == "LORA" and (not self.r or self.lora_alpha is None):
            raise ValueError("a LORA has r and lora_alpha")
        return self


@dataclass(frozen=True)
class AdapterFolder:
    """A folder written by stock peft: its config, and its tensors without peft's prefix."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    auto_class: str
    """The Auto class of the model in which it was trained; SEQUENCES for a base without a task head."""

    @property
    def targets(self) -> list[str]:
        """Paths of the adapted layers."""
        ending = ".supertuning_values" if self.is_sparse else ".lora_A.weight"
        return [name.removesuffix(ending) for name in self.tensors if name.endswith(ending)]

    @property
    def is_sparse(self) -> bool:
        """Whether it is Super-Tuning rather than LoRA alone."""
        return self.config["peft_type"] == "SUPERTUNING"

    @property
    def head(self) -> dict[str, Tensor]:
        """Tensors saved through `modules_to_save`: whole tensors of the model."""
        return {name: tensor for name, tensor in self.tensors.items() if not TENSORS[self.config["peft_type"]].fullmatch(name)}

    @property
    def classes(self) -> int | None:
        """Number of rows of the task head's last matrix; None where the folder has no head."""
        sizes = [len(tensor) for name, tensor in self.head.items() if re.search(LAST, name)]
        return sizes[0] if sizes else None

    def scale(self, target: str, rank: int) -> float:
        """Scale of the low-rank part: alpha / r, or alpha / √r (rsLoRA)."""
        alpha = _by_pattern(self.config.get("alpha_pattern"), target, self.config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def rank(self, target: str) -> int:
        return _by_pattern(self.config.get("rank_pattern"), target, self.config["r"])


def _by_pattern(pattern: Mapping[str, Any] | None, target: str, default: Any) -> Any:
    """peft's rule: the value of the first key that, as a regular expression, matches the end of the path."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", target):
            return value
    return default


def read_adapter(folder: Path | str) -> AdapterFolder:
    """Read a LoRA or Super-Tuning folder of stock peft.

    Raises UserError E313 for any other kind, for options that change what it computes, and for one that was trained in a
    model of a task that is not known here.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
        AdapterConfig.model_validate(config)
    except OSError:
        fix = f"Give a folder with {CONFIG} and {WEIGHTS}; pickled weights are not read"
        raise UserError("E313", "no peft adapter here", fix, str(folder)) from None
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"])) or "its keys"
        what = f"{CONFIG}: {key}: {fault['msg']}"
        raise UserError("E313", what, "The folder is damaged: save the adapter again", str(folder)) from None
    except (ValueError, RecursionError, SafetensorError):
        raise UserError("E313", "the adapter cannot be read", "The folder is damaged", str(folder)) from None
    if config.get("peft_type") not in TENSORS:
        raise unsupported(folder, f"peft_type {config.get('peft_type')}")
    for key, value in config.items():
        if key not in UNDERSTOOD and value and value not in DEFAULTS.get(key, ()):
            raise unsupported(folder, f"{key}: {json.dumps(value)}")
    pattern = TENSORS[config["peft_type"]]
    odd = [name for name in tensors if re.search(r"\.(lora|supertuning)_", name) and not pattern.fullmatch(name)]
    if odd or not all(name.startswith(PREFIX) for name in tensors):
        raise unsupported(folder, f"tensor {next(iter(odd), next(iter(tensors), 'none'))}")
    if broken := not_finite(tensors):
        raise UserError("E313", f"tensor {broken} has NaN or infinite numbers", "Train the adapter again", str(folder))
    plain = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    return AdapterFolder(folder, config, plain, _auto_class(config, folder))


def _auto_class(config: Mapping[str, Any], folder: Path) -> str:
    """`AdapterFolder.auto_class` by the config: peft names the task, or else the model's class. Raises UserError E313."""
    task_type, mapping = config.get("task_type"), config.get("auto_mapping")
    if task_type is None and mapping is None:
        return SEQUENCES
    name = mapping["base_model_class"] if task_type is None else task_type
    auto_class = _by_class(name) if task_type is None else READ_AS.get(task_type)
    if auto_class is None:
        fix = "Adapters of classifiers (of texts or tokens), of models that generate and of bases without a task head are read"
        raise UserError("E313", f"it was trained in a model of another task ({name:.60})", fix, str(folder))
    return auto_class


def _by_class(name: str) -> str | None:
    """The Auto class of a class of transformers; None for one of another task, or of another library."""
    if name in BARE:
        return SEQUENCES
    found = getattr(transformers, name, None)
    task = task_of_class(found) if isinstance(found, type) else None
    return task.auto_class if task else None


def unsupported(folder: Path, feature: str) -> UserError:
    """The error E313 of an adapter that computes what is not known here."""
    fix = "LoRA (rsLoRA and patterns too) and Super-Tuning with its indices are; merge others with peft"
    return UserError("E313", f"'{feature}' is not supported", fix, str(folder))
