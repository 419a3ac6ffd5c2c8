"""A pair of files as Detectron's convert_pkl_to_pb writes it: Faster R-CNN with a pyramid of features, in small.

Files are called model.pb and model_init.pb; the inputs data and im_info are filled with nothing, so that they exist.
Every stage is computed here again, by loops and sums of NumPy in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import dagexec
from dagexec import NetDef, OperatorDef, Workspace, op
from dagexec.cli import app
from tests.ops.image.test_proposals import kept, moved

RNG = np.random.default_rng(8)
CLASSES, ANCHORS, LEVELS = 4, 3, (2, 3)
STRIDES = {2: 4, 3: 8}
PROPOSALS = {"pre_nms_topN": 60, "post_nms_topN": 25, "nms_thresh": 0.7, "min_size": 2.0}
LIMITS = {"score_thresh": 0.05, "nms": 0.5, "detections_per_im": 12}
WEIGHTS = [10.0, 10.0, 5.0, 5.0]

Arrays = dict[str, np.ndarray]


def parameters() -> Arrays:
    """Random weights, by Detectron's names."""
    made = {}
    for name, shape in {
        "conv1_w": (8, 3, 3, 3), "res2_w": (8, 8, 3, 3), "res3_w": (12, 8, 3, 3), "fpn2_w": (8, 8, 1, 1),
        "fpn3_w": (8, 12, 1, 1), "conv_rpn_w": (8, 8, 3, 3), "rpn_cls_logits_w": (ANCHORS, 8, 1, 1),
        "rpn_bbox_pred_w": (4 * ANCHORS, 8, 1, 1), "fc6_w": (16, 72), "cls_score_w": (CLASSES, 16),
        "bbox_pred_w": (4 * CLASSES, 16),
    }.items():  # fmt: skip
        made[name] = RNG.normal(size=shape) / math.sqrt(math.prod(shape[1:]) / (3 if "cls" in name else 1))
        made[f"{name[:-1]}b"] = RNG.normal(size=shape[0]) / 10
    for name, channels in (("conv1", 8), ("res2", 8), ("res3", 12)):
        del made[f"{name}_b"]
        made |= {f"{name}_bn_s": RNG.uniform(0.5, 1.5, channels), f"{name}_bn_b": RNG.normal(size=channels) / 10}
    for level in LEVELS:
        side = 6.0 * STRIDES[level]
        sides = np.array([[side, side], [side * 1.4, side / 1.4], [side / 1.4, side * 1.4]])
        middle = (STRIDES[level] - 1) / 2
        made[f"anchor{level}"] = np.concatenate([middle - (sides - 1) / 2, middle + (sides - 1) / 2], 1)
    return {name: array.astype(np.float32) for name, array in made.items()}


def operators() -> list[OperatorDef]:
    """The predict net's."""
    made = []
    for name, source in (("conv1", "data"), ("res2", "conv1"), ("res3", "res2")):
        made += [
            op("Conv", [source, f"{name}_w"], name, kernel=3, stride=2, pad=1, order="NCHW"),
            op("AffineChannel", [name, f"{name}_bn_s", f"{name}_bn_b"], name),
            op("Relu", name, name),
        ]
    made += [
        op("Conv", ["res3", "fpn3_w", "fpn3_b"], "fpn3", kernel=1),
        op("Conv", ["res2", "fpn2_w", "fpn2_b"], "fpn2_lateral", kernel=1),
        op("ResizeNearest", "fpn3", "fpn2_topdown", width_scale=2.0, height_scale=2.0),
        op("Sum", ["fpn2_lateral", "fpn2_topdown"], "fpn2"),
    ]
    proposals = []
    for level in LEVELS:
        rpn, logits, boxes, probs = (f"{n}_fpn{level}" for n in ("rpn", "rpn_logits", "rpn_bbox_pred", "rpn_cls_probs"))
        made += [
            op("Conv", [f"fpn{level}", "conv_rpn_w", "conv_rpn_b"], rpn, kernel=3, pad=1),
            op("Relu", rpn, rpn),
            op("Conv", [rpn, "rpn_cls_logits_w", "rpn_cls_logits_b"], logits, kernel=1),
            op("Conv", [rpn, "rpn_bbox_pred_w", "rpn_bbox_pred_b"], boxes, kernel=1),
            op("Sigmoid", logits, probs),
            op(
                "GenerateProposals", [probs, boxes, "im_info", f"anchor{level}"],
                [f"rpn_rois_fpn{level}", f"rpn_roi_probs_fpn{level}"], correct_transform_coords=True,
                spatial_scale=1 / STRIDES[level], arg=PROPOSALS,
            ),
        ]  # fmt: skip
        proposals.append(f"rpn_rois_fpn{level}")
    names = [f"rois_fpn{level}" for level in LEVELS]
    made.append(
        op(
            "CollectAndDistributeFpnRpnProposals", [*proposals, *(f"rpn_roi_probs_fpn{n}" for n in LEVELS)],
            ["rpn_rois", *names, "rois_idx_restore_int32"], rpn_min_level=2, rpn_max_level=3, roi_min_level=2,
            roi_max_level=3, roi_canonical_scale=40, roi_canonical_level=3, rpn_post_nms_topN=30,
        )
    )  # fmt: skip
    for level, rois in zip(LEVELS, names, strict=True):
        align = {"pooled_h": 3, "pooled_w": 3, "sampling_ratio": 2, "spatial_scale": 1 / STRIDES[level]}
        made.append(op("RoIAlign", [f"fpn{level}", rois], f"roi_feat_fpn{level}", arg=align))
    return [
        *made,
        op("Concat", [f"roi_feat_fpn{n}" for n in LEVELS], ["roi_feat_shuffled", "_roi_feat_split"], axis=0),
        op("BatchPermutation", ["roi_feat_shuffled", "rois_idx_restore_int32"], "roi_feat"),
        op("FC", ["roi_feat", "fc6_w", "fc6_b"], "fc6"),
        op("Relu", "fc6", "fc6"),
        op("FC", ["fc6", "cls_score_w", "cls_score_b"], "cls_score"),
        op("Softmax", "cls_score", "cls_prob"),
        op("FC", ["fc6", "bbox_pred_w", "bbox_pred_b"], "bbox_pred"),
        op(
            "BBoxTransform", ["rpn_rois", "bbox_pred", "im_info"], "pred_bbox", weights=WEIGHTS, apply_scale=False,
            correct_transform_coords=True,
        ),
        op(
            "BoxWithNMSLimit", ["cls_prob", "pred_bbox"], ["score_nms", "bbox_nms", "class_nms"], arg=LIMITS,
            soft_nms_enabled=False, soft_nms_method="linear", soft_nms_sigma=0.5,
        ),
    ]  # fmt: skip


def conv(x: np.ndarray, w: np.ndarray, b: np.ndarray | float = 0.0, stride: int = 1) -> np.ndarray:
    pad = w.shape[2] // 2
    wide = np.pad(x, ((0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(wide, w.shape[2:], (1, 2))[:, ::stride, ::stride]
    return np.einsum("cyxij,ocij->oyx", windows, w) + np.reshape(b, (-1, 1, 1))


def aligned(image: np.ndarray, roi: np.ndarray, stride: int) -> np.ndarray:
    """Means of 2 x 2 samples in each of 3 x 3 parts."""
    x1, y1, x2, y2 = roi / stride
    high, wide = max(y2 - y1, 1.0) / 6, max(x2 - x1, 1.0) / 6
    found = np.zeros((len(image), 6, 6))
    for i, j in np.ndindex(6, 6):
        y, x = y1 + (i + 0.5) * high, x1 + (j + 0.5) * wide
        if -1 <= y <= image.shape[1] and -1 <= x <= image.shape[2]:
            y, x = min(max(y, 0), image.shape[1] - 1), min(max(x, 0), image.shape[2] - 1)
            rows, columns = np.arange(image.shape[1]), np.arange(image.shape[2])
            share = np.maximum(1 - abs(rows - y), 0)[:, None] * np.maximum(1 - abs(columns - x), 0)
            found[:, i, j] = (image * share).sum((1, 2))
    return found.reshape(-1, 3, 2, 3, 2).mean((2, 4))


def detections(p: Mapping[str, np.ndarray], data: np.ndarray, info: np.ndarray) -> Arrays:
    """The net, in float64."""
    p = {name: array.astype(float) for name, array in p.items()}
    height, width, scale = map(float, info[0])
    x, features = data[0].astype(float), {}
    for name in ("conv1", "res2", "res3"):
        x = conv(x, p[f"{name}_w"], stride=2)
        x = np.maximum(x * p[f"{name}_bn_s"][:, None, None] + p[f"{name}_bn_b"][:, None, None], 0)
        features[name] = x
    fpn = {3: conv(x, p["fpn3_w"], p["fpn3_b"])}
    fpn[2] = conv(features["res2"], p["fpn2_w"], p["fpn2_b"]) + fpn[3].repeat(2, 1).repeat(2, 2)
    collected = []
    for level in LEVELS:
        rpn = np.maximum(conv(fpn[level], p["conv_rpn_w"], p["conv_rpn_b"]), 0)
        scores = 1 / (1 + np.exp(-conv(rpn, p["rpn_cls_logits_w"], p["rpn_cls_logits_b"])))
        deltas = conv(rpn, p["rpn_bbox_pred_w"], p["rpn_bbox_pred_b"])
        best = sorted(np.ndindex(scores.shape), key=lambda place: -scores[place])[: PROPOSALS["pre_nms_topN"]]  # type: ignore[misc]
        boxes = []
        for a, row, column in best:
            shift = np.array([column, row, column, row]) * STRIDES[level]
            delta = deltas[4 * a : 4 * a + 4, row, column]
            boxes.append(moved(p[f"anchor{level}"][a] + shift, delta, (height, width), 1))  # type: ignore[arg-type]
        large = [
            n
            for n, (x1, y1, x2, y2) in enumerate(boxes)
            if min(x2 - x1 + 1, y2 - y1 + 1) >= 2 * scale and (x1 + x2 + 1) / 2 < width and (y1 + y2 + 1) / 2 < height
        ]
        collected += [(scores[best[n]], boxes[n]) for n in kept(boxes, large, 0.7, 1)[:25]]
    collected = sorted(collected, key=lambda pair: -pair[0])[:30]
    rois = np.array([box for _, box in collected])
    sides = np.sqrt((rois[:, 2] - rois[:, 0] + 1) * (rois[:, 3] - rois[:, 1] + 1))
    levels = np.clip(np.floor(3 + np.log2(sides / 40 + 1e-6)), 2, 3).astype(int)
    assert len(set(levels)) == 2
    pooled = np.stack([aligned(fpn[n], roi, STRIDES[n]) for n, roi in zip(levels, rois, strict=True)])
    fc6 = np.maximum(pooled.reshape(len(rois), -1) @ p["fc6_w"].T + p["fc6_b"], 0)
    powers = np.exp(fc6 @ p["cls_score_w"].T + p["cls_score_b"])
    probabilities = powers / powers.sum(1, keepdims=True)
    deltas = (fc6 @ p["bbox_pred_w"].T + p["bbox_pred_b"]).reshape(len(rois), CLASSES, 4) / WEIGHTS
    size = float(int(height / scale + 0.5)), float(int(width / scale + 0.5))
    found = []
    for label in range(1, CLASSES):
        boxes = [moved(roi / scale, delta, size, 1) for roi, delta in zip(rois, deltas[:, label], strict=True)]  # type: ignore[arg-type]
        order = [n for n in np.argsort(-probabilities[:, label]) if probabilities[n, label] > 0.05]
        found += [(probabilities[n, label], boxes[n], label) for n in kept(boxes, order, 0.5, 1)]  # type: ignore[arg-type]
    best = sorted((one[0] for one in found), reverse=True)[:12]
    assert len(found) > 12
    found = [one for one in found if one[0] in best]
    return {
        "score_nms": np.array([one[0] for one in found]),
        "bbox_nms": np.array([one[1] for one in found]),
        "class_nms": np.array([one[2] for one in found], float),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Arrays, Arrays]:
    """The folder, the inputs, and what should come out."""
    path, weights = tmp_path_factory.mktemp("detectron"), parameters()
    outputs = ["score_nms", "bbox_nms", "class_nms"]
    predict = NetDef(
        name="detectron", op=operators(), external_input=["data", "im_info", *weights], external_output=outputs
    )
    empty = {name: np.zeros(0, np.float32) for name in ("data", "im_info")}
    fills = [
        op("GivenTensorFill", [], name, shape=array.shape, values=array.reshape(-1).tolist())
        for name, array in (weights | empty).items()
    ]
    for name, net in (("model", predict), ("model_init", NetDef(name="detectron_init", op=fills))):
        (path / f"{name}.pb").write_bytes(net.SerializeToString())
        (path / f"{name}.pbtxt").write_text(str(net))
    feeds = {
        "data": RNG.normal(size=(1, 3, 64, 80)).astype(np.float32),
        "im_info": np.array([[64, 80, 1.6]], np.float32),
    }
    return path, feeds, detections(weights, feeds["data"], feeds["im_info"])


def check(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_a_pair_of_files_runs_under_each_net(net_type: str, folder: tuple[Path, Arrays, Arrays]) -> None:
    path, feeds, expected = folder
    model = dagexec.load_model(path)
    assert list(model.inputs) == ["data", "im_info"]
    with dagexec.compile(model, net_type=net_type, num_workers=2) as executor:
        found = executor.run(feeds)
        check(found, expected)
        again = executor.run(feeds)
    assert all(found[name].tobytes() == again[name].tobytes() for name in expected)
    workspace = Workspace()
    workspace.run_net_once(NetDef.FromString((path / "model_init.pb").read_bytes()))
    for name, array in feeds.items():
        workspace.feed_blob(name, array)
    net = NetDef.FromString((path / "model.pb").read_bytes())
    net.type, net.num_workers = net_type, 2
    workspace.create_net(net)
    workspace.run_net("detectron")
    check({name: workspace.fetch_blob(name) for name in expected}, expected)


def test_the_command_line_runs_the_folder(folder: tuple[Path, Arrays, Arrays], tmp_path: Path) -> None:
    path, feeds, expected = folder
    np.savez(tmp_path / "feeds.npz", allow_pickle=False, **feeds)
    arguments = ["run", str(path), "--input", str(tmp_path / "feeds.npz"), "--output", str(tmp_path / "found.npz")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    with np.load(tmp_path / "found.npz") as found:
        check(found, expected)
