"""Every state of small worlds around the machines that decide: queue, batching, replicas, models, cluster."""
