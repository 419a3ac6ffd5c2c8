"""The messages of gRPC, generated from `inference.proto` by `make proto`."""
