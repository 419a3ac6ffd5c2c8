"""Models on tables - trees, linear models, support vectors - beside onnxruntime, a row and many, interleaved.

    python benchmarks/tabular.py [--rounds 61] [--models ...] [--json benchmarks/results/tabular.json]

Exports of scikit-learn by skl2onnx, of LightGBM and XGBoost by onnxmltools (the extra `bench-models` has them all),
with their ZipMap where exporters make one. dagexec with no options and onnxruntime's session with none, both by `run`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import numpy.typing as npt
import onnx
import onnxmltools
import onnxruntime
import skl2onnx
import xgboost
from environment import write_report
from onnxmltools.convert.common.data_types import FloatTensorType
from skl2onnx.common.data_types import FloatTensorType as SklFloatTensorType
from sklearn import datasets, ensemble, impute, linear_model, pipeline, preprocessing, svm, tree

import dagexec

Array = npt.NDArray[Any]
BATCHES = (1, 1000)
TOLERANCE = 1e-4
_SECONDS = 0.001  # of one contender in one round: mostly less than a turn of another process on the same core

DATA: Mapping[str, Callable[[], tuple[Array, Array]]] = {
    "iris": lambda: datasets.load_iris(return_X_y=True),
    "cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "digits": lambda: datasets.load_digits(return_X_y=True),
    "classes": lambda: datasets.make_classification(2000, 20, n_informative=10, n_classes=5, random_state=0),
    "numbers": lambda: datasets.make_regression(2000, 20, random_state=0),
}


def _scaled(model: Any) -> Any:
    return pipeline.make_pipeline(preprocessing.StandardScaler(), model)


SCIKIT: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "decision tree, iris": ("iris", lambda: tree.DecisionTreeClassifier(random_state=0)),
    "decision tree, diabetes": ("diabetes", lambda: tree.DecisionTreeRegressor(max_depth=8, random_state=0)),
    "random forest, iris": ("iris", lambda: ensemble.RandomForestClassifier(100, random_state=0)),
    "random forest, cancer": ("cancer", lambda: ensemble.RandomForestClassifier(100, random_state=0)),
    "random forest, digits": ("digits", lambda: ensemble.RandomForestClassifier(100, random_state=0)),
    "random forest, numbers": ("numbers", lambda: ensemble.RandomForestRegressor(100, random_state=0)),
    "extra trees, diabetes": ("diabetes", lambda: ensemble.ExtraTreesRegressor(50, random_state=0)),
    "gradient boosting, cancer": ("cancer", lambda: ensemble.GradientBoostingClassifier(random_state=0)),
    "gradient boosting, classes": ("classes", lambda: ensemble.GradientBoostingClassifier(random_state=0)),
    "gradient boosting, diabetes": ("diabetes", lambda: ensemble.GradientBoostingRegressor(random_state=0)),
    "AdaBoost, cancer": ("cancer", lambda: ensemble.AdaBoostClassifier(random_state=0)),
    "bagging, cancer": ("cancer", lambda: ensemble.BaggingClassifier(random_state=0)),
    "logistic regression, cancer": ("cancer", lambda: _scaled(linear_model.LogisticRegression())),
    "logistic regression, iris": ("iris", lambda: _scaled(linear_model.LogisticRegression())),
    "ridge, diabetes": ("diabetes", lambda: _scaled(linear_model.Ridge())),
    "support vectors, iris": ("iris", lambda: svm.SVC(random_state=0)),
    "support vectors, cancer": ("cancer", lambda: _scaled(svm.SVC())),
    "support vectors, diabetes": ("diabetes", lambda: _scaled(svm.SVR())),
    "imputer, normalizer, forest": (
        "cancer",
        lambda: pipeline.make_pipeline(
            impute.SimpleImputer(), preprocessing.Normalizer(), ensemble.RandomForestClassifier(20, random_state=0)
        ),
    ),
}
_LIBRARIES: Mapping[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., onnx.ModelProto]]] = {
    "LightGBM": (
        partial(lightgbm.LGBMClassifier, verbose=-1, n_jobs=1),
        partial(lightgbm.LGBMRegressor, verbose=-1, n_jobs=1),
        onnxmltools.convert_lightgbm,
    ),
    "XGBoost": (
        partial(xgboost.XGBClassifier, n_jobs=1),
        partial(xgboost.XGBRegressor, n_jobs=1),
        onnxmltools.convert_xgboost,
    ),
}
BOOSTED: Mapping[str, tuple[str, Callable[[], Any], Callable[..., onnx.ModelProto]]] = {
    f"{library}, {data}": (data, build, convert)
    for library, (classifier, regressor, convert) in _LIBRARIES.items()
    for build, names in ((classifier, ("cancer", "classes")), (regressor, ("diabetes", "numbers")))
    for data in names
}
MODELS = [*SCIKIT, *BOOSTED]


def built(name: str) -> tuple[onnx.ModelProto, Array]:
    """The model, and the rows that it was fitted to; boosted trees have rows with missing numbers."""
    data, *_ = SCIKIT.get(name) or BOOSTED[name]
    given, targets = DATA[data]()
    rows = given.astype(np.float32)
    if name in SCIKIT:
        estimator = SCIKIT[name][1]().fit(rows, targets)
        kinds = [("rows", SklFloatTensorType([None, rows.shape[1]]))]
        return skl2onnx.to_onnx(estimator, initial_types=kinds, target_opset={"": 18, "ai.onnx.ml": 3}), rows
    rows[::7, 3] = np.nan
    _, build, convert = BOOSTED[name]
    estimator = build().fit(rows, targets)
    return convert(estimator, initial_types=[("rows", FloatTensorType([None, rows.shape[1]]))], target_opset=15), rows


def check(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise AssertionError where results differ by more than rounding."""
    for name, theirs in expected.items():
        ours = found[name]
        if isinstance(theirs, list):
            assert [list(row) for row in ours] == [list(row) for row in theirs]
            ours, theirs = (np.array([list(row.values()) for row in rows]) for rows in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def measure(name: str, rounds: int) -> dict[str, dict[str, float]]:
    """By batch, the median microseconds of both sides, and the median ratio of the same rounds."""
    model, rows = built(name)
    onnxruntime.set_default_logger_severity(3)  # exporters declare one row
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = {}
    with dagexec.compile(model) as executor:
        for batch in BATCHES:
            feeds = {"rows": np.ascontiguousarray(rows[np.arange(batch) % len(rows)])}
            check(executor.run(feeds), dict(zip(names, session.run(None, feeds), strict=True)))
            ours, theirs = _interleaved(partial(executor.run, feeds), partial(session.run, None, feeds), rounds)
            ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
            found[str(batch)] = {
                "dagexec_us": statistics.median(ours) * 1e6,
                "onnxruntime_us": statistics.median(theirs) * 1e6,
                "ratio": ratio,
            }
    return found


def _interleaved(
    ours: Callable[[], object], theirs: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of a call in each round, of both."""
    calls = (ours, theirs)
    for call in calls:
        _seconds(call, 20)
    counts = [max(1, min(500, int(_SECONDS / _seconds(call, 3)))) for call in calls]
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            found[side].append(_seconds(calls[side], counts[side]))
    return found


def _seconds(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def main() -> None:
    """Measure all, print a table, and write what was found to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for name in options.models:
        results[name] = measure(name, options.rounds)
        columns = (
            f"{batch}: {row['dagexec_us']:.1f} of {row['onnxruntime_us']:.1f} us, ratio {row['ratio']:.2f}"
            for batch, row in results[name].items()
        )
        print(f"{name:30}", "; ".join(columns), flush=True)
    means = {
        str(batch): math.exp(statistics.fmean(math.log(row[str(batch)]["ratio"]) for row in results.values()))
        for batch in BATCHES
    }
    print("geometric means of ratios", {batch: round(mean, 2) for batch, mean in means.items()})
    if options.json is not None:
        write_report(options.json, results={"models": results, "geometric_mean_ratios": means})


if __name__ == "__main__":
    main()
