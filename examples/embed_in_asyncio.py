"""How do I run a model from an async application?

task -+                +-> replica 0 -+
task -+-> run_async ---+              +-> results        the event loop never blocks, nor while the model is compiled
task -+                +-> replica 1 -+
"""

import asyncio

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader

import dagexec
from dagexec.errors import RunTimeoutError
from dagexec.testing import random_feeds


async def main(source: str = "zoo:lenet") -> None:
    """Serve sixteen requests from two replicas, then one that has no time and one that nobody waits for any more."""
    provider = MeterProvider([PeriodicExportingMetricReader(ConsoleMetricExporter())])
    meter = provider.get_meter("embed_in_asyncio")
    async with dagexec.compile_async(source, net_type="async_dag", replicas=2, metrics=meter) as executor:
        requests = [random_feeds(executor.model, seed=seed) for seed in range(16)]
        results = await asyncio.gather(*(executor.run_async(feeds, timeout=30) for feeds in requests))
        print(f"{len(results)} results\n{executor.statistics()}")
        try:
            await executor.run_async(requests[0], timeout=0)
        except RunTimeoutError as error:
            print(f"as expected: {error}")
        unwanted = asyncio.create_task(executor.run_async(requests[0]))
        await asyncio.sleep(0)  # it begins
        unwanted.cancel()
        await asyncio.wait([unwanted])
        print(f"as expected, cancelled: {unwanted.cancelled()}")
    provider.shutdown()  # writes what has been counted


if __name__ == "__main__":
    asyncio.run(main())
