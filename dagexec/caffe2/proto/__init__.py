"""Caffe2's messages under the names that scripts import: `from caffe2.proto import caffe2_pb2`."""
