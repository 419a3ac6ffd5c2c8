from __future__ import annotations

import sys

import numpy as np
import pytest

from dagexec.errors import DataError
from dagexec.training.datasets import digits, scaled_up


def test_the_digits_are_split_in_two_without_a_sample_in_both_or_none() -> None:
    from sklearn.datasets import load_digits  # not where tests are collected: it takes more than a second

    split = digits(seed=4)
    assert {name: array.shape for name, array in split.train.items()} == {"data": (1438, 1, 8, 8), "label": (1438,)}
    together = np.concatenate([split.train["data"], split.test["data"]])[:, 0]
    labels = np.concatenate([split.train["label"], split.test["label"]])
    bunch = load_digits()
    expected = sorted(
        (image.astype(np.float32) / 16).tobytes() + bytes([label])
        for image, label in zip(bunch.images, bunch.target, strict=True)
    )
    assert sorted(image.tobytes() + bytes([label]) for image, label in zip(together, labels, strict=True)) == expected
    assert (split.train["data"].dtype, split.train["label"].dtype) == (np.float32, np.int32)
    shares = np.bincount(split.test["label"]) / np.bincount(labels)
    assert shares == pytest.approx([0.2] * 10, abs=0.004)


def test_the_split_depends_on_the_seed_alone() -> None:
    assert digits(seed=1).test["data"].tobytes() == digits(seed=1).test["data"].tobytes()
    assert digits(seed=1).test["data"].tobytes() != digits(seed=2).test["data"].tobytes()
    assert digits(32, seed=1).test["label"].tolist() == digits(seed=1).test["label"].tolist()


def test_scaling_up_interpolates_between_the_centers_of_pixels() -> None:
    ramp = np.broadcast_to(np.arange(8, dtype=np.float32), (1, 1, 8, 8)).copy()
    for size in (8, 28, 32):
        found = scaled_up(ramp, size)
        assert found.shape == (1, 1, size, size)
        assert found.flags.c_contiguous
        centers = np.clip((np.arange(size) + 0.5) * 8 / size - 0.5, 0, 7)
        for row in found[0, 0]:
            np.testing.assert_allclose(row, np.interp(centers, np.arange(8), np.arange(8)), atol=1e-5)
        np.testing.assert_allclose(scaled_up(ramp.swapaxes(2, 3).copy(), size), found.swapaxes(2, 3), atol=1e-5)


def test_wrong_sizes_and_a_missing_module_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="found 7 and"):
        digits(7)
    with pytest.raises(ValueError, match="found 8 and 1"):
        digits(test_share=1)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install 'scikit-learn>="):
        digits()
