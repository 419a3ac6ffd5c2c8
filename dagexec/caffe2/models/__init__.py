"""Parts of models, under the names of `caffe2.python.models`."""
