"""Loading a pair of nets from files and running it, in the calls that Caffe2's tutorial documents."""

import os
import sys

import numpy as np
from caffe2.python import workspace

with open(os.path.join(sys.argv[1], "init_net.pb"), "rb") as f:
    init_net = f.read()
with open(os.path.join(sys.argv[1], "predict_net.pb"), "rb") as f:
    predict_net = f.read()
img = np.load(os.path.join(sys.argv[1], "inputs.npz"))["data"]
p = workspace.Predictor(init_net, predict_net)
results = np.asarray(p.run([img]))
