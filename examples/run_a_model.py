"""How do I run a model?

    load -> feed -> run -> outputs

Takes a .onnx file, a folder with init_net.pb and predict_net.pb, or zoo:NAME.
"""

import sys

import dagexec
from dagexec.testing import random_feeds


def main(source: str = "zoo:squeezenet") -> None:
    """Run the model once on random numbers and print what comes out."""
    with dagexec.compile(source) as executor:
        feeds = random_feeds(executor.model)
        for name, array in executor.run(feeds).items():
            print(f"{name}: {array.dtype} {array.shape}, largest at index {array.argmax()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
