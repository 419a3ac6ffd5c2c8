"""Two models and Python steps as one net: find digits in an image, and read them.

    image -> prepare -> detect -> crop -+-> read --+-> text
      (uint8)                           +-> weigh -+

`detect` looks for spots that are like a digit, `crop` cuts them out, `read` says which digit each is and `weigh` how
much ink it has. The weights of the nets are the shapes of the digits, so that nothing has to be trained.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import dagexec

Array = npt.NDArray[Any]

FONT = """
 ###    #    ###  #####    #  #####   ##  #####  ###   ###
#   #  ##   #   #    #    ##  #      #        # #   # #   #
#  ##   #       #   #    # #  ####  #        #  #   # #   #
# # #   #      #     #  #  #      # ####    #    ###   ####
##  #   #     #       # #####     # #   #  #    #   #     #
#   #   #    #    #   #    #  #   # #   #  #    #   #    #
 ###   ###  #####  ###     #   ###   ###   #     ###   ##
"""
SCALE = 3
HEIGHT, WIDTH = 7 * SCALE, 5 * SCALE
MARGIN = 2  # of a crop around a digit, on each side: the place that is found may be off by so much
CROP = (HEIGHT + 2 * MARGIN, WIDTH + 2 * MARGIN)
IMAGE = (64, 256)


def glyphs() -> Array:
    """The ten digits as images of 0 and 1."""
    rows = [line.ljust(60) for line in FONT.strip("\n").split("\n")]
    starts = (0, 6, 12, 18, 24, 30, 36, 42, 48, 54)
    small = [[[letter == "#" for letter in row[start : start + 5]] for row in rows] for start in starts]
    return np.kron(np.array(small, np.float32), np.ones((1, SCALE, SCALE), np.float32))


def templates() -> Array:
    """For each digit a filter that answers to it more than to any other: of mean 0 and length 1."""
    centered = glyphs() - glyphs().mean((1, 2), keepdims=True)
    filters: Array = centered / np.sqrt((centered**2).sum((1, 2), keepdims=True))
    return filters[:, None]


def model(
    name: str,
    operators: Sequence[dagexec.OperatorDef],
    parameters: dict[str, Array],
    inputs: dict[str, dagexec.InputInfo],
    output: str,
) -> dagexec.Model:
    """A Model of one output."""
    net = dagexec.NetDef(name=name, op=operators)
    return dagexec.Model(name, net, parameters=parameters, inputs=inputs, outputs=(output,))


def detector() -> dagexec.Model:
    """How much each place is like any of the digits: (N, 1, H, W) to (N, 10, H - 20, W - 14), and its peaks."""
    operators = [
        dagexec.op("Conv", ["x", "filters"], "likeness", kernel_h=HEIGHT, kernel_w=WIDTH),
        dagexec.op("Relu", "likeness", "likeness"),
        dagexec.op("ReduceMax", "likeness", "heat", axes=[1], keepdims=1),
        dagexec.op("MaxPool", "heat", "peaks", kernel=15, stride=1, pad=7),
        dagexec.op("Concat", ["heat", "peaks"], ["maps", "_"], axis=1),
    ]
    inputs = {"x": info(1, 1, *IMAGE)}
    return model("detector", operators, {"filters": templates()}, inputs, "maps")


def reader() -> dagexec.Model:
    """Which digit each crop shows: (N, 1, 25, 19) to (N, 10), the likeness at the best of the places in the crop."""
    places = 2 * MARGIN + 1
    operators = [
        dagexec.op("Conv", ["crops", "filters"], "likeness", kernel_h=HEIGHT, kernel_w=WIDTH),
        dagexec.op("MaxPool", "likeness", "best", kernel=places, stride=places),
        dagexec.op("Reshape", "best", ["digits", "_"], shape=[-1, 10]),
    ]
    return model("reader", operators, {"filters": templates()}, {"crops": info(None, 1, *CROP)}, "digits")


def scale() -> dagexec.Model:
    """How much ink each crop has: (N, 1, 25, 19) to (N, 1)."""
    area = CROP[0] * CROP[1]
    operators = [
        dagexec.op("Reshape", "crops", ["flat", "_"], shape=[-1, area]),
        dagexec.op("FC", ["flat", "w", "b"], "ink"),
    ]
    parameters = {"w": np.full((1, area), 1 / area, np.float32), "b": np.zeros(1, np.float32)}
    return model("scale", operators, parameters, {"crops": info(None, 1, *CROP)}, "ink")


def info(*shape: int | None) -> dagexec.InputInfo:
    """A float32 input of this shape, None for any size."""
    return dagexec.TensorSpec.of(("float32", shape)).info


def prepare(image: Array) -> Array:
    """Bytes to floats from 0 to 1, with axes for the batch and the channel."""
    return (image.astype(np.float32) / np.float32(255))[None, None]


def crop(image: Array, maps: Array) -> Array:
    """The crops around the peaks of the heat, from left to right."""
    heat, peaks = maps[0]
    tops, lefts = np.nonzero((heat == peaks) & (heat > 0.75 * heat.max()))
    order = np.argsort(lefts, kind="stable")
    padded = np.pad(image[0, 0], MARGIN)
    found = [
        padded[top : top + CROP[0], left : left + CROP[1]] for top, left in zip(tops[order], lefts[order], strict=True)
    ]
    return np.array(found, np.float32).reshape(-1, 1, *CROP)


def write(digits: Array, ink: Array) -> tuple[str, Array]:
    """The digits as a text, and the ink of all together."""
    return "".join(map(str, digits.argmax(1))), ink.sum(dtype=np.float32)


def ocr() -> dagexec.Pipeline:
    """The pipeline: from bytes of shape (64, 256) to a text."""
    p = dagexec.Pipeline("ocr")
    image = p.input("image", "uint8", IMAGE)
    x = p.python("prepare", prepare, image, f"float32[1, 1, {IMAGE[0]}, {IMAGE[1]}]")
    maps = p.stage("detect", detector(), x=x)
    crops = p.python("crop", crop, [x, maps], {"crops": ("float32", ("N", 1, *CROP))})
    digits = p.stage("read", reader(), crops)
    ink = p.stage("weigh", scale(), crops)
    text = p.python("write", write, [digits, ink], {"text": "string[]", "ink": "float32[]"})
    p.output("text", text["text"])
    p.output("ink", text["ink"])
    return p


def page(seed: int) -> tuple[Array, str]:
    """A noisy image with 3 to 7 digits in a row, each at a height of its own, and what they are."""
    random = np.random.default_rng(seed)
    digits = random.integers(0, 10, random.integers(3, 8))
    image = np.zeros(IMAGE, np.float32)
    for place, digit in enumerate(digits):
        top, left = random.integers(4, IMAGE[0] - HEIGHT - 4), 8 + 34 * place + random.integers(0, 8)
        image[top : top + HEIGHT, left : left + WIDTH] = glyphs()[digit] * random.uniform(0.9, 1)
    noisy = np.clip(image * 0.8 + random.uniform(0, 0.15, IMAGE), 0, 1)
    return (noisy * 255).astype(np.uint8), "".join(map(str, digits))


def main() -> None:
    """Read ten pages."""
    with dagexec.compile(ocr(), net_type="dag", num_workers=2) as executor:
        right = 0
        for seed in range(10):
            image, expected = page(seed)
            found = executor.run({"image": image})["text"].item().decode()
            right += found == expected
            print(f"{expected}: read as {found}")
    print(f"{right} of 10 pages are read right")


if __name__ == "__main__":
    main()
