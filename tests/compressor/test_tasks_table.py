"""The words of tasks and of sizes that are kept here are those of the libraries."""

import pytest
import torch
import transformers
from peft import TaskType
from torch import nn

from compressor.models.build import AUTO_CLASSES, SEQUENCES, auto_class_of
from compressor.models.normalized import normalized
from compressor.models.tasks_table import HEAD_TASKS, auto_model_of, task_of_class
from tests.compressor.conftest import TRIED, tiny


@pytest.mark.parametrize("task", HEAD_TASKS, ids=lambda task: task.name)
def test_a_task_is_what_the_libraries_call_so(task):
    assert auto_model_of(task) is getattr(transformers, task.auto_class)
    assert TaskType(task.peft)


@pytest.mark.parametrize(
    ("name", "auto_class"),
    [
        ("BertForSequenceClassification", "AutoModelForSequenceClassification"),
        ("DebertaV2ForTokenClassification", "AutoModelForTokenClassification"),
        ("GPT2LMHeadModel", "AutoModelForCausalLM"),
        ("LlamaForCausalLM", "AutoModelForCausalLM"),
        ("T5ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
    ],
)
def test_a_model_class_has_a_task_pruned_or_not(name, auto_class):
    from compressor.models import auto

    for model_class in (getattr(transformers, name), getattr(auto, f"Compressed{name}")):
        assert task_of_class(model_class).auto_class == auto_class


def test_another_class_has_none_and_counts_as_one_of_sequences():
    assert task_of_class(nn.Linear) is None and task_of_class(transformers.BertModel) is None
    assert auto_class_of(nn.Linear(1, 1)) == SEQUENCES and len(AUTO_CLASSES) == 4


@pytest.mark.parametrize("name", TRIED)
def test_sizes_have_one_name_in_every_architecture(name):
    sizes = normalized(tiny(name, torch.float32).config)
    assert (sizes.num_layers, sizes.num_attention_heads, sizes.hidden_size, sizes.vocab_size) == (3, 4, 32, 99)


def test_a_type_that_optimum_does_not_know_has_the_usual_names():
    config = transformers.AutoConfig.for_model("ibert", hidden_size=32, num_hidden_layers=2)
    assert (normalized(config).hidden_size, normalized(config).num_layers) == (32, 2)
