"""Which algorithm is the fastest for my convolution, and does it change the result?

         +-> default (im2col, matrix product) -+
         +-> WINOGRAD -------------------------+
image ---+-> FFT ------------------------------+-> time, error against float64
         +-> DIRECT ---------------------------+
         +-> exhaustive_search: the fastest ---+-> choices.json

Takes channels, filters, size of the image and of the kernel: `python conv_engines.py 64 64 56 3`. An algorithm that
cannot compute the layer is passed over for the default one, and the log says why.
"""

import logging
import sys
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import dagexec
from dagexec import InputInfo, Model

REPEAT = 5


@dataclass(frozen=True)
class Layer:
    """A convolution with stride 1; an odd kernel keeps the size of the image."""

    image: npt.NDArray[np.floating]
    weights: npt.NDArray[np.floating]

    def model(self, engine: str) -> Model:
        """A net of one operator, with the filter as a parameter."""
        kernel = self.weights.shape[-1]
        layer = dagexec.op("Conv", ["image", "filter"], ["result"], engine=engine, kernel=kernel, pad=kernel // 2)
        net = dagexec.NetDef(name="layer", op=[layer])
        parameters = {"filter": self.weights}
        return Model("layer", net, parameters=parameters, inputs={"image": InputInfo()}, outputs=("result",))

    def run(self, engine: str = "", **arguments: int) -> tuple[npt.NDArray[np.float64], float]:
        """The result, and the least milliseconds of a run."""
        seconds = []
        with dagexec.compile(self.model(engine), net_type="simple", operator_arguments=arguments) as executor:
            result = executor.run({"image": self.image})["result"]
            for _ in range(REPEAT):
                start = time.perf_counter()
                executor.run({"image": self.image})
                seconds.append(time.perf_counter() - start)
        return result.astype(np.float64), min(seconds) * 1e3


def main(channels: int = 32, filters: int = 32, size: int = 56, kernel: int = 3) -> None:
    """Run each engine, then let dagexec search, and use the choice again from a file."""
    logging.basicConfig(level=logging.INFO, format="  (%(message)s)", stream=sys.stdout)
    rng = np.random.default_rng(0)
    image = rng.standard_normal((1, channels, size, size), np.float32)
    weights = rng.standard_normal((filters, channels, kernel, kernel), np.float32)
    exact, _ = Layer(image.astype(np.float64), weights.astype(np.float64)).run()
    layer = Layer(image, weights)

    def report(name: str, result: npt.NDArray[np.float64], milliseconds: float) -> None:
        error = np.abs(result - exact).max() / np.abs(exact).max()
        print(f"{name:18} {milliseconds:8.3f} ms, largest error {error:.1e} of the largest result")

    for engine in ("", "WINOGRAD", "FFT", "DIRECT"):
        report(engine or "default", *layer.run(engine))

    searched, milliseconds = layer.run(exhaustive_search=1)
    report("exhaustive_search", searched, milliseconds)
    print(f"chosen: {', '.join(dagexec.choices.all().values())}")
    print(f"choices.json: {dagexec.save_choices('choices.json')} choice(s) saved")

    dagexec.choices.forget()
    print(f"choices.json: {dagexec.load_choices('choices.json')} choice(s) loaded")
    again, _ = layer.run(exhaustive_search=1, deterministic=1)  # measures nothing, so no noise decides
    print(f"same bytes: {again.tobytes() == searched.tobytes()}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
