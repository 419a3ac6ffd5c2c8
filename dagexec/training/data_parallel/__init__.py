"""Training on several devices at once, synchronously: every step is that of one device with all the data.

    model = parallelize(build_inputs, build_forward, SGD(0.1), devices=["sim:0", "sim:1"])
    losses = model.step({"data": images, "label": labels})

| Module | What it has |
|---|---|
| `parallelizing` | `parallelize` |
| `replica_devices`, `replica` | the devices, and the model on each |
| `parallel_model` | `ParallelModel`: what is done with the result |
| `all_reduce_model`, `joint_net`, `bucketing` | one net for all devices |
| `threaded_model`, `synchronization`, `pairing` | a thread and nets for each device, as a tree or a ring |
| `flat_buffer`, `solver_thread` | what those are made of |
| `batch_statistics` | batch normalization over the batches of all devices |
"""

from dagexec.training.data_parallel.parallel_model import ParallelModel
from dagexec.training.data_parallel.parallelizing import REDUCTIONS, parallelize
from dagexec.training.data_parallel.replica_devices import ReplicaDevice, find_replica_devices

__all__ = ["REDUCTIONS", "ParallelModel", "ReplicaDevice", "find_replica_devices", "parallelize"]
