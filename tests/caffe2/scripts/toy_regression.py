"""Toy regression: a line through noisy points, in the calls that Caffe2's tutorial documents."""

import numpy as np
from caffe2.python import core, workspace

workspace.ResetWorkspace()
init_net = core.Net("init")
W_gt = init_net.GivenTensorFill([], "W_gt", shape=[1, 2], values=[2.0, 1.5])
B_gt = init_net.GivenTensorFill([], "B_gt", shape=[1], values=[0.5])
ONE = init_net.ConstantFill([], "ONE", shape=[1], value=1.0)
ITER = init_net.ConstantFill([], "ITER", shape=[1], value=0, dtype=core.DataType.INT64)
W = init_net.UniformFill([], "W", shape=[1, 2], min=-1.0, max=1.0)
B = init_net.ConstantFill([], "B", shape=[1], value=0.0)

train_net = core.Net("train")
X = train_net.GaussianFill([], "X", shape=[64, 2], mean=0.0, std=1.0, run_once=0)
Y_gt = X.FC([W_gt, B_gt], "Y_gt")
noise = train_net.GaussianFill([], "noise", shape=[64, 1], mean=0.0, std=0.1, run_once=0)
Y_noise = Y_gt.Add(noise, "Y_noise")
Y_noise = Y_noise.StopGradient([], "Y_noise")
Y_pred = X.FC([W, B], "Y_pred")
dist = train_net.SquaredL2Distance([Y_noise, Y_pred], "dist")
loss = dist.AveragedLoss([], ["loss"])
gradient_map = train_net.AddGradientOperators([loss])
train_net.Iter(ITER, ITER)
LR = train_net.LearningRate(ITER, "LR", base_lr=-0.1, policy="step", stepsize=20, gamma=0.9)
train_net.WeightedSum([W, ONE, gradient_map[W], LR], W)
train_net.WeightedSum([B, ONE, gradient_map[B], LR], B)

workspace.RunNetOnce(init_net)
workspace.CreateNet(train_net)
history = []
for _ in range(100):
    before = workspace.FetchBlob("W"), workspace.FetchBlob("B")
    workspace.RunNet(train_net.Proto().name)
    history.append([*before, *workspace.FetchBlobs([X, "Y_noise", "W", "B"])])
assert np.abs(workspace.FetchBlob("W") - workspace.FetchBlob("W_gt")).max() < 0.1
