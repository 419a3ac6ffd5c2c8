"""scikit-learn's estimators through skl2onnx: operators of the domain ai.onnx.ml, and texts as inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import skl2onnx
from skl2onnx.common.data_types import FloatTensorType, Int64TensorType, StringTensorType
from sklearn import (
    calibration,
    cluster,
    compose,
    decomposition,
    discriminant_analysis,
    ensemble,
    feature_extraction,
    feature_selection,
    gaussian_process,
    impute,
    linear_model,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)

from model_files.recipe import Array, Feeds, Recipe

FAMILY = "scikit"
_ROWS, _COLUMNS = 120, 6


@dataclass(frozen=True)
class _Fitted:
    """An estimator to fit and convert.

    Attributes:
        build: makes it.
        data: what it is fitted to: rows, and targets.
        options: of skl2onnx.
    """

    build: Callable[[], Any]
    data: Callable[[], tuple[Array, Array]]
    options: Mapping[str, Any]

    def write(self, file: Path) -> Sequence[Feeds]:
        rows, targets = self.data()
        estimator = self.build()
        np.random.seed(0)  # of estimators without a seed of their own
        estimator.fit(rows, targets)
        kind = {"f": FloatTensorType, "i": Int64TensorType, "O": StringTensorType}[rows.dtype.kind]
        model = skl2onnx.to_onnx(
            estimator,
            initial_types=[("rows", kind([None, rows.shape[1]]))],
            options={id(estimator): dict(self.options)} if self.options else None,
            target_opset={"": 18, "ai.onnx.ml": 3},
        )
        file.write_bytes(model.SerializeToString())
        return [{"rows": rows[:count]} for count in (10, 1, 33)]


def recipes() -> list[Recipe]:
    return [Recipe(f"{FAMILY}/{name}", fitted.write) for name, fitted in _ESTIMATORS.items()]


def _numbers(kind: str) -> tuple[Array, Array]:
    random = np.random.default_rng(0)
    rows = random.standard_normal((_ROWS, _COLUMNS)).astype(np.float32)
    score = rows @ random.standard_normal(_COLUMNS) + 0.1 * random.standard_normal(_ROWS)
    if kind == "classes":
        return rows, np.digitize(score, [-1, 1])
    if kind == "two":
        return rows, (score > 0).astype(np.int64)
    if kind == "names":
        return rows, np.array(["low", "middle", "high"])[np.digitize(score, [-1, 1])]
    return rows, score.astype(np.float32)


def _counts() -> tuple[Array, Array]:
    rows, targets = _numbers("classes")
    return np.abs(np.round(3 * rows)).astype(np.float32), targets


def _holes() -> tuple[Array, Array]:
    rows, targets = _numbers("classes")
    rows = rows.copy()
    rows[::7, 2] = np.nan
    return rows, targets


def _categories(kind: type) -> tuple[Array, Array]:
    numbers = np.random.default_rng(0).integers(4, size=(_ROWS, 3))
    targets = numbers.sum(1) % 2
    return (numbers if kind is int else np.array(["red", "green", "blue", "é"], object)[numbers]), targets


def _texts() -> tuple[Array, Array]:
    words = np.array(["one", "two", "three", "four", "five", "six"], object)
    random = np.random.default_rng(0)
    lines = [" ".join(words[random.integers(6, size=5)]) for _ in range(_ROWS)]
    return np.array(lines, object)[:, None], random.integers(2, size=_ROWS)


def _first_column(text: Any) -> Any:
    """A vectorizer that reads the only column of rows of text."""
    return compose.ColumnTransformer([("text", text, 0)])


def _mixed() -> Any:
    scaled = pipeline.make_pipeline(impute.SimpleImputer(), preprocessing.StandardScaler())
    columns = compose.ColumnTransformer(
        [
            ("scaled", scaled, [0, 1, 2]),
            (
                "bins",
                preprocessing.KBinsDiscretizer(4, encode="ordinal", quantile_method="averaged_inverted_cdf"),
                [3, 4],
            ),
        ],
        remainder="passthrough",
    )
    return pipeline.make_pipeline(columns, linear_model.LogisticRegression(max_iter=500))


def _each(data: Callable[[], tuple[Array, Array]], *builds: Any, **options: Any) -> dict[str, _Fitted]:
    """Estimators by the names of their classes."""
    return {getattr(build, "__name__", "") or build.func.__name__: _Fitted(build, data, options) for build in builds}


_FOREST = partial(ensemble.RandomForestClassifier, 20, random_state=0)
_COUNTS = partial(feature_extraction.text.CountVectorizer, lowercase=False)  # letters' case needs a locale
_WEIGHTS = partial(feature_extraction.text.TfidfVectorizer, lowercase=False)
_PLAIN = {"zipmap": False}
_CLASSIFIERS = _each(
    partial(_numbers, "classes"),
    partial(linear_model.LogisticRegression, max_iter=500),
    partial(linear_model.SGDClassifier, loss="log_loss", random_state=0),
    linear_model.Perceptron,
    linear_model.RidgeClassifier,
    partial(svm.SVC, probability=True, random_state=0),
    svm.NuSVC,
    partial(tree.DecisionTreeClassifier, random_state=0),
    _FOREST,
    partial(ensemble.ExtraTreesClassifier, 20, random_state=0),
    partial(ensemble.GradientBoostingClassifier, n_estimators=20, random_state=0),
    partial(ensemble.AdaBoostClassifier, n_estimators=10, random_state=0),
    partial(ensemble.BaggingClassifier, random_state=0),
    partial(neighbors.KNeighborsClassifier, 3),
    naive_bayes.GaussianNB,
    discriminant_analysis.LinearDiscriminantAnalysis,
    discriminant_analysis.QuadraticDiscriminantAnalysis,
    partial(neural_network.MLPClassifier, (16,), max_iter=100, random_state=0),
    partial(calibration.CalibratedClassifierCV, cv=2),
    **_PLAIN,
)
_REGRESSORS = _each(
    partial(_numbers, "numbers"),
    linear_model.LinearRegression,
    linear_model.Ridge,
    linear_model.Lasso,
    linear_model.BayesianRidge,
    partial(linear_model.SGDRegressor, random_state=0),
    svm.SVR,
    svm.LinearSVR,
    partial(tree.DecisionTreeRegressor, random_state=0),
    partial(ensemble.RandomForestRegressor, 20, random_state=0),
    partial(ensemble.GradientBoostingRegressor, n_estimators=20, random_state=0),
    partial(ensemble.AdaBoostRegressor, n_estimators=10, random_state=0),
    partial(neighbors.KNeighborsRegressor, 3),
    partial(gaussian_process.GaussianProcessRegressor, random_state=0),
    partial(neural_network.MLPRegressor, hidden_layer_sizes=(16,), max_iter=100, random_state=0),
    partial(ensemble.IsolationForest, n_estimators=20, random_state=0),
)
_TRANSFORMERS = _each(
    partial(_numbers, "classes"),
    preprocessing.StandardScaler,
    preprocessing.MinMaxScaler,
    preprocessing.MaxAbsScaler,
    preprocessing.RobustScaler,
    preprocessing.Normalizer,
    preprocessing.Binarizer,
    preprocessing.PowerTransformer,
    partial(preprocessing.PolynomialFeatures, 2),
    partial(preprocessing.KBinsDiscretizer, 4, encode="ordinal", quantile_method="averaged_inverted_cdf"),
    partial(decomposition.PCA, 3),
    partial(decomposition.TruncatedSVD, 3),
    partial(cluster.KMeans, 4, random_state=0, n_init=2),
    partial(feature_selection.SelectKBest, k=3),
)
_ESTIMATORS: dict[str, _Fitted] = {
    **_CLASSIFIERS,
    **_REGRESSORS,
    **_TRANSFORMERS,
    **_each(_counts, naive_bayes.MultinomialNB, naive_bayes.BernoulliNB, naive_bayes.ComplementNB, **_PLAIN),
    **_each(_holes, impute.SimpleImputer),
    **_each(partial(_numbers, "classes"), svm.LinearSVC),
    "ZipMap": _Fitted(linear_model.LogisticRegression, partial(_numbers, "two"), {}),
    "ClassNames": _Fitted(linear_model.LogisticRegression, partial(_numbers, "names"), _PLAIN),
    "ForestOfTwoClasses": _Fitted(_FOREST, partial(_numbers, "two"), _PLAIN),
    "OneHotEncoder.int64": _Fitted(preprocessing.OneHotEncoder, partial(_categories, int), {}),
    "OneHotEncoder.string": _Fitted(preprocessing.OneHotEncoder, partial(_categories, str), {}),
    "OrdinalEncoder.int64": _Fitted(preprocessing.OrdinalEncoder, partial(_categories, int), {}),
    "OrdinalEncoder.string": _Fitted(preprocessing.OrdinalEncoder, partial(_categories, str), {}),
    "CountVectorizer": _Fitted(lambda: _first_column(_COUNTS()), _texts, {}),
    "TfidfVectorizer": _Fitted(lambda: _first_column(_WEIGHTS()), _texts, {}),
    "Mixed": _Fitted(_mixed, _holes, {}),
}  # fmt: skip
