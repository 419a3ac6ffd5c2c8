"""Tables of records in blobs, as Caffe2's data sets are: cursors, packed records, and what else nets read data from."""
