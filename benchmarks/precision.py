"""Networks in bfloat16 and int8 beside float32: what they lose, and how much faster they are.

    python benchmarks/precision.py [--models resnet50 ...] [--threads 1] [--inputs 16] [--calibration 4] [--seconds 5]

Weights are random (He-normal, see `tests.models` and `dagexec.zoo`), inputs normal. int8 is calibrated on other inputs
than it is compared on. Prints a table in Markdown, the one of docs/precision.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from dagexec.analysis.comparison import random_feeds
from dagexec.analysis.precision_report import LowPrecision, PrecisionReport, precision_report
from dagexec.binding.parameters import initialized
from dagexec.core.model import Model
from dagexec.executor.source.loading import load_model
from dagexec.options import CompileOptions
from tests.models import LIGHT_MODELS, he_normal_light_model

NAMES = (*LIGHT_MODELS, "mobilenet_v2", "lenet")
PRECISIONS: tuple[LowPrecision, ...] = ("bfloat16", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--threads", type=int, default=1, help="threads of an operator")
    parser.add_argument("--inputs", type=int, default=16)
    parser.add_argument("--calibration", type=int, default=4, help="inputs that int8 is calibrated on")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring for each compilation")
    parser.add_argument("--repeat", type=int, default=31)
    options = parser.parse_args()
    print("| model | | ms | float32 ms | speed-up | largest error | rms error | cosine | top-1 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.models:
        model = build(name)
        for dtype in PRECISIONS:
            calibration = [random_feeds(model, seed=1000 + number) for number in range(options.calibration)]
            report = precision_report(
                model,
                dtype,
                options.inputs,
                calibration=calibration if dtype == "int8" else (),
                repeat=options.repeat,
                options=CompileOptions(intra_op_threads=options.threads, tuning_seconds=options.seconds),
            )
            print(row(name, report), flush=True)


def build(name: str) -> Model:
    """A light model of the onnx package with He-normal weights, or one of the zoo."""
    return initialized(load_model(he_normal_light_model(name) if name in LIGHT_MODELS else f"zoo:{name}"))


def row(name: str, report: PrecisionReport) -> str:
    [output] = report.outputs
    top_1 = "-" if output.top_1 is None else f"{output.top_1:.0%}"
    return (
        f"| {name} | {report.dtype} | {report.dtype_ms:.2f} | {report.float32_ms:.2f} | {report.speed_up:.2f} | "
        f"{output.largest:.1%} | {output.rms:.1%} | {output.cosine:.5f} | {top_1} |"
    )


if __name__ == "__main__":
    main()
