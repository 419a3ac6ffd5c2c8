"""char-rnn: an LSTM that learns to continue a text, in the calls that Caffe2's example documents, on a few letters."""

import numpy as np
from caffe2.python import brew, core, model_helper, workspace
from caffe2.python.optimizer import build_sgd
from caffe2.python.rnn_cell import LSTM

TEXT = "to be or not to be that is the question " * 4
letters = sorted(set(TEXT))
place = {letter: index for index, letter in enumerate(letters)}
D, hidden_size, batch_size, seq_length = len(letters), 8, 2, 5

model = model_helper.ModelHelper(name="char_rnn")
input_blob, seq_lengths, hidden_init, cell_init, target = model.net.AddExternalInputs(
    "input_blob", "seq_lengths", "hidden_init", "cell_init", "target"
)
hidden_output_all, hidden_output, _, cell_state = LSTM(
    model, input_blob, seq_lengths, (hidden_init, cell_init), D, hidden_size, scope="LSTM"
)
output = brew.fc(model, hidden_output_all, None, dim_in=hidden_size, dim_out=D, axis=2)
softmax = model.net.Softmax(output, "softmax", axis=2)
softmax_reshaped, _ = model.net.Reshape(softmax, ["softmax_reshaped", "_"], shape=[-1, D])
forward_net = core.Net(model.net.Proto())
xent = model.net.LabelCrossEntropy([softmax_reshaped, target], "xent")
loss = model.net.AveragedLoss(xent, "loss")
model.AddGradientOperators([loss])
build_sgd(model, base_learning_rate=0.1 * seq_length, policy="step", stepsize=1, gamma=0.9999)
prepare_state = core.Net("prepare_state")
prepare_state.Copy(hidden_output, hidden_init)
prepare_state.Copy(cell_state, cell_init)

start = np.zeros([1, batch_size, hidden_size], dtype=np.float32)
workspace.FeedBlob(hidden_init, start)
workspace.FeedBlob(cell_init, start)
workspace.FeedBlob(seq_lengths, np.array([seq_length] * batch_size, dtype=np.int32))
workspace.RunNetOnce(model.param_init_net)
names = [str(param) for param in model.params]
params = dict(zip(names, workspace.FetchBlobs(names), strict=True))

part = len(TEXT) // batch_size
inputs, targets, losses = [], [], []
for step in range(12):
    codes = np.array(
        [
            [place[TEXT[(b * part + step * seq_length + t) % len(TEXT)]] for b in range(batch_size)]
            for t in range(seq_length + 1)
        ]
    )
    inputs.append(np.eye(D, dtype=np.float32)[codes[:-1]])
    targets.append(codes[1:].reshape(-1).astype(np.int32))
    workspace.FeedBlob("input_blob", inputs[-1])
    workspace.FeedBlob("target", targets[-1])
    if step == 0:
        workspace.CreateNet(model.net)
        workspace.CreateNet(prepare_state)
    workspace.RunNet(model.net.Name())
    losses.append(float(workspace.FetchBlob("loss")))
    workspace.RunNet(prepare_state.Name())
trained = dict(zip(names, workspace.FetchBlobs(names), strict=True))
workspace.CreateNet(forward_net)
workspace.RunNet(forward_net.Name())
prediction = workspace.FetchBlob("softmax")
