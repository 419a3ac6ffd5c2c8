"""How do I run a model from an async application?

task -+                +-> replica 0 -+
task -+-> run_async ---+              +-> results        the event loop never blocks
task -+                +-> replica 1 -+
"""

import asyncio

import dagexec
from dagexec.errors import RunTimeoutError
from dagexec.testing import random_feeds


async def main(source: str = "zoo:lenet") -> None:
    """Serve sixteen requests from two replicas, then one that has no time."""
    async with dagexec.compile(source, net_type="async_dag", replicas=2) as executor:
        requests = [random_feeds(executor.model, seed=seed) for seed in range(16)]
        results = await asyncio.gather(*(executor.run_async(feeds, timeout=30) for feeds in requests))
        print(f"{len(results)} results; {executor.statistics()}")
        try:
            await executor.run_async(requests[0], timeout=0)
        except RunTimeoutError as error:
            print(f"as expected: {error}")


if __name__ == "__main__":
    asyncio.run(main())
