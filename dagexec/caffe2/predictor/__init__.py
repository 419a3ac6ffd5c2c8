"""Trained nets as files, for Caffe2's predictors: in a database, or as a pair of nets for mobile devices."""
