"""How do I serve a model from many processes?

              +-> replica 0 (process) -+
clients ------+                        +-> answers        parameters are in each machine's shared memory once
              +-> replica 1 (process) -+
                       X is killed: another takes its place, and what it ran runs elsewhere
"""

import asyncio
import os
import signal

import dagexec.cluster
from dagexec.testing import random_feeds


async def main(source: str = "zoo:lenet", replicas: int = 2) -> None:
    """Ask replicas on a local Ray cluster, kill one under load, and compare with an executor of this process."""
    deployment = await asyncio.to_thread(dagexec.cluster.deploy, source, replicas=replicas)
    async with deployment, dagexec.compile_async(source) as executor:
        requests = [random_feeds(executor.model, seed=seed) for seed in range(16)]
        expected = [await executor.run_async(feeds) for feeds in requests]
        answers = [asyncio.create_task(deployment.run_async(feeds, timeout=60)) for feeds in requests * 20]
        await answers[0]
        _, process, *_ = deployment.statistics().replicas[0].place.split()
        os.kill(int(process), signal.SIGKILL)
        found = await asyncio.gather(*answers)
        same = all(
            one[name].tobytes() == other[name].tobytes()
            for one, other in zip(found, expected * 20, strict=True)
            for name in other
        )
        print(f"{len(found)} answers, the bytes of one process: {same}")
        print(f"replicas that were lost: {deployment.statistics().lost}")


if __name__ == "__main__":
    asyncio.run(main())
