"""Two delta files side by side: norms, cosines and shared places are those of the dense deltas."""

from dataclasses import replace

import pytest
import torch

from compressor.deltas.kinds.refit import Refit
from compressor.deltas.links import WHOLE, chain, chains
from compressor.methods import apply
from compressor.models.anatomy import matrices_of
from compressor.pruning.surgery import Removal, remove
from compressor.storage import delta_file
from compressor.storage.delta_comparison import BASES_APART, DIVIDED_APART, TURNED_APART, compare_deltas
from compressor.storage.peft.attach import attach_adapter
from compressor.storage.peft.read import read_adapter
from compressor.storage.peft.write import write_peft
from compressor.training.moved_weights import as_deltas, trained_weights
from tests.compressor.conftest import OPTIONS, tiny, tuned
from tests.compressor.delta_parts import write


def test_comparison_against_the_dense_deltas(tmp_path):
    models = [tuned(tiny("gpt2"), method, ("query", "ffn_out")) for method in ("dsee", "selective")]
    with torch.no_grad():
        for name, parameter in models[1].named_parameters():
            if name.endswith("values"):
                parameter.mul_(-2)
    paths = [write(model, tmp_path / str(number)) for number, model in enumerate(models)]
    rows = compare_deltas(*map(delta_file.read, paths))
    pairs = list(zip(*(matrices_of(model, ("query", "ffn_out")) for model in models), strict=True))
    assert len(rows) == len(pairs)
    by_place = {row.place.removesuffix("[0:32]").removesuffix(".weight"): row for row in rows}
    for a, b in pairs:
        row, x, y = by_place[a.path.removesuffix("[query]")], a.delta.flatten(), b.delta.flatten()
        assert row.kinds == ("low_rank+sparse", "sparse")
        assert row.norms == pytest.approx((float(x.norm()), float(y.norm())))
        assert row.cosine == pytest.approx(float(torch.cosine_similarity(x, y, dim=0)))
        assert row.jaccard == 1


def test_what_a_refit_changed_is_not_compared(tmp_path):
    """Two trainings are not alike because the same cut was refitted before both."""
    rows = []
    for refitted in (False, True):
        models = [tuned(tiny("bert", torch.float32), "lora", ("ffn_out",)) for _ in range(2)]
        with torch.no_grad():
            for name, parameter in models[1].named_parameters():
                parameter.mul_(-2 if name.endswith(".B") else 1)
        for model in models if refitted else ():
            for matrix in matrices_of(model, ("ffn_out",)):
                matrix.attach(Refit(torch.ones_like(matrix.original)))
        rows.append(
            compare_deltas(*(delta_file.read(write(model, tmp_path / str(number))) for number, model in enumerate(models)))
        )
    plain, with_refit = ([(row.norms, row.cosine) for row in each] for each in rows)
    assert plain == with_refit and plain[0][1] == pytest.approx(-1) and rows[1][0].kinds == ("low_rank+refit", "low_rank+refit")


def test_comparison_of_whole_matrices(tmp_path):
    """A dense ΔW, as mixout leaves it, against a sparse one."""
    models = [tuned(tiny("gpt2"), method, ("query", "ffn_out")) for method in ("mixout", "selective")]
    rows = compare_deltas(*(delta_file.read(write(model, tmp_path / str(number))) for number, model in enumerate(models)))
    pairs = list(zip(*(matrices_of(model, ("query", "ffn_out")) for model in models), strict=True))
    assert [row.kinds for row in rows] == [("offset", "sparse")] * len(pairs)
    expected = [float(torch.cosine_similarity(a.delta.flatten(), b.delta.flatten(), dim=0)) for a, b in pairs]
    assert sorted(row.cosine for row in rows) == pytest.approx(sorted(expected))


def test_fully_tuned_weights_against_deltas(tmp_path):
    """GPT-2 stores its matrices transposed, and query, key and value in one; files of earlier versions hold them as stored."""
    full = tiny("gpt2", torch.float32)
    apply(full, "full", OPTIONS)
    before = trained_weights(full)
    with torch.no_grad():
        for parameter in full.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    as_deltas(full, before, "1")
    models = [full, tuned(tiny("gpt2", torch.float32), "lora", ("query", "output", "ffn_out"))]
    expected = {}
    for a, b in zip(*(matrices_of(model, ("output", "ffn_out")) for model in models), strict=True):
        expected[f"{a.path}.weight"] = float(torch.cosine_similarity(a.delta.flatten(), b.delta.flatten(), dim=0))

    def compared():
        rows = compare_deltas(*(delta_file.read(write(model, tmp_path / str(n))) for n, model in enumerate(models)))
        fused = [row for row in rows if row.place.partition("[")[0].endswith("c_attn.weight")]
        assert len(fused) == 2 * 3 and {(row.cosine, row.reason) for row in fused} == {(None, DIVIDED_APART)}
        return [row for row in rows if row.place in expected]

    rows = compared()
    assert {row.place: row.cosine for row in rows} == pytest.approx(expected, abs=1e-6)
    for _, owner, name in chains(full):
        for link in chain(owner, name):
            if link.place.transposed:
                link.place, link.values = WHOLE, torch.nn.Parameter(link.values.detach().T.contiguous())
    earlier = compared()
    assert {(row.cosine, row.reason) for row in earlier} == {(None, TURNED_APART)}
    norms = ([norm for row in found for norm in row.norms] for found in (rows, earlier))
    assert next(norms) == pytest.approx(next(norms))


def test_parts_of_a_fused_weight_against_all_of_it(tmp_path):
    """As a LoRA comes back from peft: both change query and value."""
    ours, theirs = tuned(tiny("gpt2", torch.float32), "lora"), tiny("gpt2", torch.float32)
    write_peft(ours, tmp_path / "peft", base="here")
    attach_adapter(theirs, read_adapter(tmp_path / "peft"))
    files = [delta_file.read(write(model, tmp_path / str(number))) for number, model in enumerate((ours, theirs))]
    rows = compare_deltas(*files)
    assert len(rows) == 3 * 3 and {(row.cosine, row.jaccard, row.reason) for row in rows} == {(None, None, DIVIDED_APART)}
    assert all(row.cosine == pytest.approx(1) for file in files for row in compare_deltas(file, file))


@pytest.mark.parametrize("case", ["adapter", "propetl"])
def test_modules_of_two_widths_have_norms_alone(case, tmp_path):
    rows = []
    for width in (3, 5):
        model = tiny("bert", torch.float32)
        apply(model, case, replace(OPTIONS, bottleneck=width))
        rows.append(delta_file.read(write(model, tmp_path / str(width))))
    for row in compare_deltas(*rows):
        assert row.cosine is row.jaccard is None and all(row.norms)


def test_models_cut_in_two_ways_have_norms_alone(tmp_path):
    models = [tuned(tiny("bert", torch.float32), "selective", places=200) for _ in range(2)]
    for head, model in enumerate(models):
        remove(model, {0: Removal(heads=[head])})
    rows = compare_deltas(*(delta_file.read(write(model, tmp_path / str(number))) for number, model in enumerate(models)))
    assert all(row.cosine is row.jaccard is None and all(row.norms) for row in rows)


@pytest.mark.parametrize("sizes", [{"hidden_size": 64}, {}], ids=["other widths", "the same widths"])
def test_deltas_of_two_bases_have_norms_alone(sizes, tmp_path):
    """A place is a number in its own base's matrix, row after row: of another width it is another place."""
    models = [tuned(tiny("bert", torch.float32, **keys), "selective") for keys in ({}, sizes)]
    files = [delta_file.read(write(model, tmp_path / name, sha256=name)) for model, name in zip(models, "ab", strict=True)]
    rows = compare_deltas(*files)
    assert {(row.cosine, row.jaccard, row.reason) for row in rows} == {(None, None, BASES_APART)}
    assert all(all(row.norms) for row in rows)


def test_comparison_of_masks_and_of_what_only_one_changes(tmp_path):
    first, second = (tuned(tiny("bert", torch.float32, seed), "propetl") for seed in (0, 1))
    rows = compare_deltas(*(delta_file.read(write(model, tmp_path / name)) for model, name in ((first, "a"), (second, "b"))))
    masks = [model.bert.encoder.layer[0].output.dense.inserts[0].source for model in (first, second)]
    a, b = (torch.cat([mask.mask(name).flatten().bool() for name in ("down", "up")]) for mask in masks)
    assert rows[0].jaccard == pytest.approx(float((a & b).sum() / (a | b).sum()))
    lora = write(tuned(tiny("bert", torch.float32), "lora"), tmp_path / "c")
    alone = compare_deltas(delta_file.read(tmp_path / "a"), delta_file.read(lora))[0]
    assert alone.kinds == ("adapter", "-") and alone.norms[1] == 0 and alone.cosine is alone.jaccard is None


def shared_lora(rank: int = 2, groups: tuple[str, ...] = ("1",)):
    """A model with masked prototypes of A and B on query and value, one for each of `groups`."""
    model = tiny("bert", torch.float32)
    for group in groups:
        apply(model, "propetl", replace(OPTIONS, shared="lora", rank=rank, group=group))
    return model


@pytest.mark.parametrize(
    "other",
    [lambda: shared_lora(3), *(lambda case=case: tuned(tiny("bert", torch.float32), case) for case in ("selective", "dsee"))],
    ids=["rank 3", "selective", "dsee"],
)
def test_supports_of_different_entries_are_not_compared(other, tmp_path):
    """Masks are over the entries of A and B, an Ω is over those of the matrix; of two ranks, A and B have other shapes."""
    first, second = (delta_file.read(write(model, tmp_path / str(n))) for n, model in enumerate((shared_lora(), other())))
    assert {row.jaccard for row in compare_deltas(first, second)} == {None}
    assert {row.jaccard for one in (first, second) for row in compare_deltas(one, one)} == {1}


def test_masks_over_two_prototypes_are_not_joined(tmp_path):
    """As two trainings of one model leave them: an entry of one is none of the other."""
    found = delta_file.read(write(shared_lora(groups=("1", "2")), tmp_path / "x"))
    assert {row.jaccard for row in compare_deltas(found, found)} == {None}
