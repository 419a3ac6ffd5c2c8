"""What operators compute, a package a family. A family computes with NumPy; engines are beside, in
`dagexec.ops.engines`."""
