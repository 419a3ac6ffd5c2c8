"""What a net is made of: errors, dtypes, protos, devices, tensors, blobs, workspaces, schemas, operators, graphs.

Nothing here knows how a net is scheduled (`dagexec.scheduler`) or what an operator computes (`dagexec.ops`).
"""
