"""Caffe2's Python interface, `caffe2.python`, on dagexec's nets, workspaces, gradients and operators.

    from dagexec.caffe2 import core, workspace

    net = core.Net("first")
    x = net.GaussianFill([], "x", shape=[2, 3])
    y = net.Relu(x, "y")
    workspace.RunNetOnce(net)
    print(workspace.FetchBlob("y"))

Behind `install()`, scripts may import it as `caffe2.python`; `python -m dagexec.caffe2 SCRIPT.py` runs one so. Names
and behavior are Caffe2's (Apache License 2.0); the code is dagexec's own. What is there is in docs/caffe2.md.
"""

from dagexec.caffe2.installing import install, uninstall

__all__ = ["install", "uninstall"]
